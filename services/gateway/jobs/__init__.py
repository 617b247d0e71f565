"""Jobs as HTTP dialects need them: calls to the routers, items from bodies, answers from results."""
