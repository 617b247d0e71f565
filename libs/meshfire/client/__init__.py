"""The public SDK: an async client of the router's InferenceService with typed events.

    async with MeshfireClient("127.0.0.1:8600") as client:
        async for event in client.generate("smollm2-135m-instruct", [Message("user", "Hello!")]):
            if isinstance(event, Delta):
                sys.stdout.write(event.text)

Owns no state of a request; a call that is left early is cancelled. Errors are those of `meshfire.errors`.
"""

from meshfire.client.client import MeshfireClient
from meshfire.client.events import (
    CallDelta,
    Delta,
    Event,
    Finished,
    Logprobs,
    Model,
    PromptPart,
    Receipt,
    Started,
    Usage,
)
from meshfire.client.prompts import Message, Prompt, Sampling, Tool, ToolCall
from meshfire.grammar.rules import (
    CallsRule,
    ChoiceRule,
    FunctionRule,
    GrammarRule,
    JsonRule,
    OutputRule,
    RegexRule,
)

__all__ = [
    "CallDelta",
    "CallsRule",
    "ChoiceRule",
    "Delta",
    "Event",
    "Finished",
    "FunctionRule",
    "GrammarRule",
    "JsonRule",
    "Logprobs",
    "MeshfireClient",
    "Message",
    "Model",
    "OutputRule",
    "Prompt",
    "PromptPart",
    "Receipt",
    "RegexRule",
    "Sampling",
    "Started",
    "Tool",
    "ToolCall",
    "Usage",
]
