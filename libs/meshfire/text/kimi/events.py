"""What a piece of output is: reasoning, content, or part of a tool call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Reasoning:
    """Text that the model thought."""

    text: str


@dataclass(frozen=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call opens. `index` counts the calls of this output from 0, `call_id` is unique in the conversation."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """A call is complete. `is_valid`: its arguments are a JSON object."""

    index: int
    is_valid: bool


Event: TypeAlias = Reasoning | Content | CallBegin | CallArguments | CallEnd
