"""Chat messages as templates expect them: checked, nulls gone, lists of texts joined.

Templates print what they get: a null as "None", a list of parts as Python. So equal meanings are made equal here.
Raises InvalidPrompt with the field, as in `messages[1].role`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshfire.errors import InvalidPrompt

ROLES = ("system", "developer", "user", "assistant", "tool")
Message = dict[str, Any]


def normalised(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages, each with a role and a content that is no null."""
    if not messages:
        raise InvalidPrompt("a chat needs at least one message", field="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def developer_as_system(messages: Sequence[Message]) -> list[Message]:
    """For templates that know no developer: it is the newer name of the system role."""
    return [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]


def _message(message: Mapping[str, Any], field: str) -> Message:
    role = message.get("role")
    if role not in ROLES:
        raise InvalidPrompt(f"{role!r} is no role; roles are {', '.join(ROLES)}", field=f"{field}.role")
    rest = {key: _without_nulls(value) for key, value in message.items() if value is not None}
    return {**rest, "role": role, "content": _content(message.get("content"), f"{field}.content")}


def _content(content: Any, field: str) -> Any:
    """A text, or, where parts are not all text, the list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise InvalidPrompt("content is neither text nor a list of parts", field=field)
    texts = [part.get("text") for part in content if part.get("type", "text") == "text"]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidPrompt("a text part lacks its text", field=field)
    return "".join(map(str, texts)) if len(texts) == len(content) else _without_nulls(content)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    return value
