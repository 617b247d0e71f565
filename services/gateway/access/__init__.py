"""Who may use the gateway, how often, and for how much. Knows no dialect."""
