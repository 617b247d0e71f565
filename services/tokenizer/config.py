"""Settings of the tokenizer service (environment prefix MESHFIRE_TOKENIZER_)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from meshfire.runtime.settings import ServiceSettings, settings_config


class TokenizerSettings(ServiceSettings):
    """Which models' texts."""

    model_config = settings_config("MESHFIRE_TOKENIZER_")

    #: Served name → Hugging Face directory; in the environment a JSON object. Only tokenizer files are read.
    models: dict[str, Path] = Field(min_length=1)
    #: Prompts of more characters are rendered and encoded on a thread of their own, so that streams go on meanwhile.
    inline_chars: int = Field(default=4_000, ge=0)
    #: Token batches of more tokens (a reopened stream sends all at once) are decoded on a thread of their own.
    inline_tokens: int = Field(default=4_096, ge=0)
