"""The arguments of one call as they come: what can be shown now, and what must wait.

Owns three rules. White space around the JSON is dropped. No arguments at all are `{}`. A JSON string that holds the
object (a model that encoded twice) is unpacked, for which it is held until it is complete. Pieces joined are the same
however the text was cut.
"""

from __future__ import annotations

import json

_SPACES = " \t\r\n"


class ArgumentText:
    """State of one call."""

    def __init__(self) -> None:
        self._shown = ""
        self._held = ""

    def push(self, text: str) -> str:
        """More text; returns what is certain."""
        pending = self._held + text
        if not self._shown:
            pending = pending.lstrip(_SPACES)
            if pending.startswith('"'):
                self._held = pending
                return ""
        certain = pending.rstrip(_SPACES)
        self._held = pending[len(certain) :]
        self._shown += certain
        return certain

    def finish(self) -> str:
        """The call is complete: what was held back."""
        rest = "" if self._shown else _unpacked(self._held.rstrip(_SPACES)) or "{}"
        self._shown += rest
        self._held = ""
        return rest

    def cut(self) -> str:
        """The output ended inside the call: what was held back, as it is."""
        rest = "" if self._shown else self._held.rstrip(_SPACES)
        self._shown += rest
        return rest

    @property
    def text(self) -> str:
        """Everything shown so far."""
        return self._shown

    @property
    def is_valid(self) -> bool:
        """Whether what was shown is a JSON object."""
        try:
            return isinstance(json.loads(self._shown), dict)
        except (ValueError, RecursionError):
            return False


def _unpacked(text: str) -> str:
    """The text inside a JSON string that holds an object; any other text as it is."""
    try:
        inside = json.loads(text)
        if isinstance(inside, str) and isinstance(json.loads(inside), dict):
            return inside.strip(_SPACES)
    except (ValueError, RecursionError):
        pass
    return text
