"""Models by name, and prompts to tokens. Knows no wire.

Errors name the field by its path in a TokenizeRequest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshfire.errors import BadInput, InvalidPrompt, UnknownModel
from meshfire.grammar.compiler import GrammarCompiler
from meshfire.text.kimi.chat import KimiChat, kimi_chat, own_template
from meshfire.text.kimi.detokenizer import ChatDetokenizer
from meshfire.text.kimi.headers import Functions
from meshfire.text.kimi.markers import Marker, Markers
from meshfire.text.kimi.output import OutputParser, State
from meshfire.text.template import ChatTemplate
from meshfire.text.tokenizer import Tokenizer, encode_segments, load_tokenizer


@dataclass(frozen=True)
class ChatPrompt:
    """Messages to render; `template_kwargs_json` = further variables of the template, a JSON object or empty."""

    messages: Sequence[Mapping[str, Any]]
    template_kwargs_json: str = ""
    add_generation_prompt: bool = True
    tools: Sequence[Mapping[str, Any]] = ()
    thinking: bool | None = None


@dataclass(frozen=True)
class OutputStart:
    """State of the output parser before the first token."""

    state: State
    first_call: int


@dataclass(frozen=True)
class EncodedChat:
    """Token ids of a chat. `output`: how the answer is to be read; None = as text."""

    token_ids: list[int]
    output: OutputStart | None


@dataclass(frozen=True)
class TextModel:
    """All of a model that concerns text."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    #: Kimi's control tokens, if the vocabulary has them: chats are then in Kimi's language
    markers: Markers | None
    #: checks rules for outputs
    compiler: GrammarCompiler

    @classmethod
    def load(cls, name: str, directory: Path) -> TextModel:
        """Raises CheckpointError."""
        tokenizer = load_tokenizer(directory)
        template, markers = ChatTemplate.load(directory, tokenizer.specials), Markers.find(tokenizer.specials)
        if template is None and markers is not None:
            template = ChatTemplate.compile(own_template(), tokenizer.specials)
        compiler = GrammarCompiler(tokenizer)
        compiler.warm_up()
        return cls(name, tokenizer, template, markers, compiler)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a raw prompt, none of them a control token."""
        return self.tokenizer.encode_plain(text)

    def encode_chat(self, prompt: ChatPrompt) -> EncodedChat:
        """Token ids of a rendered chat. Raises InvalidPrompt."""
        if self.template is None:
            raise InvalidPrompt(f"model {self.name!r} has no chat template: send a raw prompt", field="chat")
        try:
            chat = self._chat(prompt)
            segments = self.template.segments(
                chat.messages, options=chat.options, add_generation_prompt=prompt.add_generation_prompt
            )
        except InvalidPrompt as error:
            raise InvalidPrompt(error.message, field=f"chat.{error.field}") from error
        token_ids = encode_segments(self.tokenizer, segments)
        if self.markers is None:
            return EncodedChat(token_ids, None)
        thinks = bool(token_ids) and self.markers.by_id.get(token_ids[-1]) is Marker.THINK_BEGIN
        return EncodedChat(token_ids, OutputStart(State.REASONING if thinks else State.CONTENT, chat.first_call))

    def detokenizer(
        self, output: OutputStart, tools: Sequence[Mapping[str, Any]], stop: Sequence[str]
    ) -> ChatDetokenizer:
        """Reads one output as its format says. Raises BadInput for a model without a chat language."""
        if self.markers is None:
            raise BadInput(f"model {self.name!r} has no chat language", field="output")
        parser = OutputParser(
            self.tokenizer.vocabulary,
            self.markers,
            start=output.state,
            functions=Functions.declared(list(tools)),
            first_call=output.first_call,
        )
        return ChatDetokenizer(parser, stop)

    def _chat(self, prompt: ChatPrompt) -> KimiChat:
        options = dict(_options(prompt.template_kwargs_json))
        if self.markers is not None:
            chat = kimi_chat(prompt.messages, prompt.tools, thinking=prompt.thinking)
            return KimiChat(chat.messages, {**options, **chat.options}, chat.first_call)
        if prompt.tools:
            raise InvalidPrompt(f"model {self.name!r} has no tool-call language", field="tools")
        if prompt.thinking is not None:
            options |= {"thinking": prompt.thinking, "enable_thinking": prompt.thinking}
        return KimiChat([dict(one) for one in prompt.messages], options, 0)


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
