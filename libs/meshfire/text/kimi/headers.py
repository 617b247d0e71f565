"""Which function a call's header names, in the many spellings that checkpoints write.

Owns the tolerance: the canonical `functions.name:3` is taken at its word, whatever name it has; every other spelling
counts only if it leads to a declared function. Knows nothing of streams.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_CANONICAL = re.compile(r"functions\.(?P<name>.+):\d+", re.DOTALL)
_WRAPPED = re.compile(r"functions?\((?P<name>.+)\)(?:[:_]\d+(?:\.\d+)?)?", re.DOTALL)
_PREFIX = re.compile(r"functions?[._]?")
_INDEX = re.compile(r"[:_.]?\d+(?:\.\d+)?$")


@dataclass(frozen=True)
class Functions:
    """Declared functions: name → the names of its parameters."""

    parameters: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def declared(cls, tools: list[Mapping[str, Any]]) -> Functions:
        """From a request's tools."""
        found = {}
        for tool in tools:
            function = tool.get("function")
            if tool.get("type") == "function" and isinstance(function, Mapping):
                schema = function.get("parameters") or {}
                found[str(function["name"])] = frozenset(schema.get("properties") or ())
        return cls(found)

    def named(self, header: str) -> str | None:
        """The function that a header names; None if only the arguments can tell."""
        header = header.strip()
        canonical = _CANONICAL.fullmatch(header)
        candidates = _candidates(header)
        known = next((name for one in candidates if (name := self._declared(one))), None)
        if known is not None:
            return known
        return canonical["name"].strip() if canonical else None

    def guessed(self, header: str, arguments: str) -> str:
        """The function whose parameters the arguments fit best; the header itself if none does."""
        try:
            given = json.loads(arguments)
        except ValueError:
            given = None
        keys = frozenset(given) if isinstance(given, dict) else frozenset()
        fitting = [name for name, known in self.parameters.items() if keys and keys <= known]
        if len(self.parameters) == 1:
            fitting = list(self.parameters)
        best = min(fitting, key=lambda name: len(self.parameters[name] - keys), default=None)
        return best or _candidates(header.strip())[-1] or header.strip() or "unknown"

    def _declared(self, name: str) -> str | None:
        """A declared name, or the only one that differs in dashes and underscores."""
        if name in self.parameters:
            return name
        alike = [one for one in self.parameters if one.replace("-", "_") == name.replace("-", "_")]
        return alike[0] if len(alike) == 1 and name else None


def _candidates(header: str) -> list[str]:
    """Readings of a header, the likeliest first."""
    wrapped = _WRAPPED.fullmatch(header)
    if wrapped:
        return [wrapped["name"].strip()]
    bare = _PREFIX.sub("", header, count=1) if _PREFIX.match(header) else header
    readings = [bare.rsplit(":", 1)[0], _INDEX.sub("", bare), bare, header]
    return list(dict.fromkeys(one.strip() for one in readings))
