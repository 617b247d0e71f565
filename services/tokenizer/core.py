"""Models by name, and prompts to tokens. Knows no wire.

Errors name the field by its path in a TokenizeRequest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshfire.errors import InvalidPrompt, UnknownModel
from meshfire.text.template import ChatTemplate
from meshfire.text.tokenizer import Tokenizer, encode_segments, load_tokenizer


@dataclass(frozen=True)
class ChatPrompt:
    """Messages to render; `template_kwargs_json` = further variables of the template, a JSON object or empty."""

    messages: Sequence[Mapping[str, str]]
    template_kwargs_json: str = ""
    add_generation_prompt: bool = True

    @property
    def num_chars(self) -> int:
        """Size of all that has to be read."""
        return sum(len(text) for one in self.messages for text in one.values()) + len(self.template_kwargs_json)


@dataclass(frozen=True)
class TextModel:
    """All of a model that concerns text."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None

    @classmethod
    def load(cls, name: str, directory: Path) -> TextModel:
        """Raises CheckpointError."""
        tokenizer = load_tokenizer(directory)
        return cls(name, tokenizer, ChatTemplate.load(directory, tokenizer.specials))

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a raw prompt, none of them a control token."""
        return self.tokenizer.encode_plain(text)

    def encode_chat(self, prompt: ChatPrompt) -> list[int]:
        """Token ids of a rendered chat. Raises InvalidPrompt."""
        if self.template is None:
            raise InvalidPrompt(f"model {self.name!r} has no chat template: send a raw prompt", field="chat")
        try:
            segments = self.template.segments(
                prompt.messages,
                options=_options(prompt.template_kwargs_json),
                add_generation_prompt=prompt.add_generation_prompt,
            )
        except InvalidPrompt as error:
            raise InvalidPrompt(error.message, field=f"chat.{error.field}") from error
        return encode_segments(self.tokenizer, segments)


@dataclass(frozen=True)
class TextModels:
    """The models of this service."""

    by_name: Mapping[str, TextModel]

    @classmethod
    def load(cls, directories: Mapping[str, Path]) -> TextModels:
        """Raises CheckpointError for the first model that cannot be read. Blocking."""
        return cls({name: TextModel.load(name, directory) for name, directory in directories.items()})

    def find(self, name: str) -> TextModel:
        """Raises UnknownModel."""
        found = self.by_name.get(name)
        if found is None:
            served = ", ".join(self.by_name)
            raise UnknownModel(f"model {name!r} is not served by this tokenizer; it serves {served}", field="model")
        return found


def _options(template_kwargs_json: str) -> Mapping[str, Any]:
    if not template_kwargs_json:
        return {}
    try:
        options = json.loads(template_kwargs_json)
    except (ValueError, RecursionError) as error:
        raise InvalidPrompt(f"no JSON: {error}", field="template_kwargs_json") from None
    if not isinstance(options, dict):
        raise InvalidPrompt("no JSON object", field="template_kwargs_json")
    return options
