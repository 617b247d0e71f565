"""Text ⇄ tokens as pure functions: tokenizers, chat templates, streaming detokenisation, scripts. No wire, no model."""
