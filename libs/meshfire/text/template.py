"""A model's chat template: messages to a prompt in which only the template controls.

Knows no tokenizer beyond its control tokens: it returns segments, which `tokenizer.encode_segments` encodes. For
ordinary texts the ids are those of Hugging Face's `apply_chat_template`. They differ where a message spells out a
control token: there it becomes one, here never, not even in an assistant's own turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateSyntaxError

from meshfire.errors import CheckpointError, InvalidPrompt
from meshfire.text import messages as chat
from meshfire.text import model_files
from meshfire.text.jinja_environment import compile_template
from meshfire.text.specials import Segment, SpecialTokens
from meshfire.text.tokenizer import without_surrogates
from meshfire.text.untrusted import Guard

_RESERVED = frozenset({"messages", "add_generation_prompt", "raise_exception", "strftime_now"})
_NO_OPTIONS: Mapping[str, Any] = {}


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template. `variables` are those it may read beside the messages, such as `bos_token`."""

    template: Template
    specials: SpecialTokens
    variables: Mapping[str, Any]
    knows_developer: bool

    @classmethod
    def compile(
        cls,
        source: str,
        specials: SpecialTokens,
        variables: Mapping[str, Any] = _NO_OPTIONS,
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> ChatTemplate:
        """Raises CheckpointError for a template with a syntax error."""
        try:
            return cls(compile_template(source, now), specials, variables, "developer" in source)
        except TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template is wrong in line {error.lineno}: {error.message}") from None

    @classmethod
    def load(cls, directory: Path, specials: SpecialTokens) -> ChatTemplate | None:
        """The template of a model directory: chat_template.jinja, else in tokenizer_config.json; None without one."""
        source = _source(directory)
        return None if source is None else cls.compile(source, specials, model_files.named_tokens(directory))

    def segments(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        options: Mapping[str, Any] = _NO_OPTIONS,
        add_generation_prompt: bool = True,
    ) -> list[Segment]:
        """The prompt as control tokens and plain texts. `options` are further variables of the template.

        Raises InvalidPrompt with the field `messages…` or `template_kwargs_json`.
        """
        self._check(options)
        turns = chat.normalised(messages)
        turns = turns if self.knows_developer else chat.developer_as_system(turns)
        guard = Guard.against([turns, options], self.specials)
        variables = {"tools": None, "documents": None, **self.variables, **guard.option(options)}
        rendered = self._render(
            {**variables, "messages": guard.message(turns), "add_generation_prompt": add_generation_prompt}
        )
        return guard.segments(without_surrogates(rendered))

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        options: Mapping[str, Any] = _NO_OPTIONS,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt as one text, for people to read: control tokens cannot be told from text in it."""
        segments = self.segments(messages, options=options, add_generation_prompt=add_generation_prompt)
        return "".join(one if isinstance(one, str) else one.content for one in segments)

    def _check(self, options: Mapping[str, Any]) -> None:
        taken = sorted((_RESERVED | self.variables.keys()) & options.keys())
        if taken:
            raise InvalidPrompt(f"{taken[0]!r} cannot be set", field="template_kwargs_json")

    def _render(self, variables: Mapping[str, Any]) -> str:
        try:
            return self.template.render(variables)
        except (
            Exception
        ) as error:  # a template is a program: what it raises for a message it dislikes is its own affair
            raise InvalidPrompt(f"the model's chat template refuses the messages: {error}", field="messages") from error


def _source(directory: Path) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    entry = model_files.read_json(directory, "tokenizer_config.json").get("chat_template")
    if isinstance(entry, list):  # several by name
        named = {one.get("name"): one.get("template") for one in entry if isinstance(one, Mapping)}
        entry = named.get("default")
    return entry if isinstance(entry, str) else None
