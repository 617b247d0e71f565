"""Ids of tool calls: the client's on the outside, Kimi's `functions.{name}:{k}` on the inside.

The model reads ids in its history and copies their form; a foreign one teaches it to write calls that nobody can parse.
So every id is rewritten on the way in, k counted over the whole conversation, and tool results follow their calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshfire.errors import InvalidPrompt

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Rewritten:
    """The conversation in Kimi's ids. `next_index`: k of the first call that the answer may make."""

    messages: list[dict[str, Any]]
    next_index: int


def kimi_id(name: str, index: int) -> str:
    """The id of call `index` of a conversation."""
    return f"functions.{name}:{index}"


def rewrite_ids(messages: Sequence[Message]) -> Rewritten:
    """Give every call its Kimi id, and every tool result the id of its call.

    A result without a `tool_call_id`, or with one that no open call has, belongs to the next call that is still open
    (clients of older APIs send none). Raises InvalidPrompt naming the message for one without any open call.
    """
    rewritten: list[dict[str, Any]] = []
    open_calls: list[tuple[str | None, str]] = []  # client's id, Kimi's id; not answered yet
    next_index = 0
    for position, message in enumerate(messages):
        copy = dict(message)
        if message.get("role") == "assistant" and message.get("tool_calls"):
            calls: list[dict[str, Any]] = []
            open_calls = []
            for call in message["tool_calls"]:
                new_id = kimi_id(_name_of(call, position, len(calls)), next_index)
                open_calls.append((call.get("id"), new_id))
                calls.append({**call, "id": new_id})
                next_index += 1
            copy["tool_calls"] = calls
        elif message.get("role") == "tool":
            copy["tool_call_id"] = _answered(open_calls, message, position)
        rewritten.append(copy)
    return Rewritten(rewritten, next_index)


def _name_of(call: Mapping[str, Any], position: int, index: int) -> str:
    name = (call.get("function") or {}).get("name")
    if not isinstance(name, str) or not name:
        field = f"messages[{position}].tool_calls[{index}].function.name"
        raise InvalidPrompt("a tool call needs the name of its function", field=field)
    return name


def _answered(open_calls: list[tuple[str | None, str]], message: Message, position: int) -> str:
    wanted = message.get("tool_call_id")
    if not open_calls:
        raise InvalidPrompt(
            "a tool message answers a call of the assistant message before it; there is none left",
            field=f"messages[{position}].tool_call_id",
        )
    found = next((index for index, (given, _) in enumerate(open_calls) if given == wanted), 0)
    return open_calls.pop(found)[1]
