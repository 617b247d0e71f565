"""A chat in Kimi's language, ready for its template: ids rewritten, tools declared.

Owns the variables that Kimi's template reads beside the messages. Works with a checkpoint's own template as with
Meshfire's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from meshfire.text.kimi.call_ids import rewrite_ids
from meshfire.text.kimi.declarations import declare_tools, sorted_keys
from meshfire.text.kimi.schema_types import UnsupportedSchema


@dataclass(frozen=True)
class KimiChat:
    """`options` are variables of the template. `first_call`: number of the first call that the answer may make."""

    messages: list[dict[str, Any]]
    options: Mapping[str, Any]
    first_call: int


def kimi_chat(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, thinking: bool | None
) -> KimiChat:
    """Prepare a chat; `thinking` None leaves it to the template. Raises InvalidPrompt naming the message."""
    rewritten = rewrite_ids(messages)
    options: dict[str, Any] = {} if thinking is None else {"thinking": thinking}
    if tools:
        options["tools"] = sorted_keys(tools)
        with suppress(UnsupportedSchema):  # the template then writes the tools as JSON
            options["tools_ts_str"] = declare_tools(tools)
    return KimiChat(rewritten.messages, options, rewritten.next_index)


@cache
def own_template() -> str:
    """Source of Meshfire's template, for checkpoints that bring none."""
    return Path(__file__).with_name("template.jinja").read_text(encoding="utf-8")
