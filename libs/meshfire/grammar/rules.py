"""What an output must look like, as plain values.

Owns the vocabulary of rules; knows nothing of grammars. A rule binds the answer only: reasoning before it is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias


@dataclass(frozen=True)
class JsonRule:
    """A JSON value that fits `schema`; `{"type": "object"}` for any object. `field` names it in complaints."""

    schema: Mapping[str, Any] | bool
    field: str = "rule.content.json_schema"


@dataclass(frozen=True)
class RegexRule:
    """The whole answer matches `pattern`."""

    pattern: str
    field: str = "rule.content.regex"


@dataclass(frozen=True)
class ChoiceRule:
    """The answer is one of `options`, exactly."""

    options: tuple[str, ...]
    field: str = "rule.content.choices"


@dataclass(frozen=True)
class GrammarRule:
    """The answer is derived from `start` of a grammar: Lark, or GBNF (a `root ::=` rule)."""

    source: str
    field: str = "rule.content.grammar"


ContentRule: TypeAlias = JsonRule | RegexRule | ChoiceRule | GrammarRule


@dataclass(frozen=True)
class FunctionRule:
    """A function that may be called. `parameters`: schema of its arguments; None = any JSON object."""

    name: str
    parameters: Mapping[str, Any] | bool | None = None
    field: str = "rule.calls"


@dataclass(frozen=True)
class CallsRule:
    """Tool calls. `mode`: auto = the model decides; required = at least one call and nothing else; none = no call."""

    mode: Literal["auto", "required", "none"]
    functions: tuple[FunctionRule, ...] = ()
    parallel: bool = True


@dataclass(frozen=True)
class OutputRule:
    """Both together: with calls in mode auto the answer is either; with calls that are required, only they count."""

    content: ContentRule | None = None
    calls: CallsRule | None = None

    @property
    def binds(self) -> bool:
        """False = everything is allowed."""
        return self.content is not None or self.calls is not None
