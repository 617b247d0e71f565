"""The Jinja dialect that chat templates are written in, sandboxed.

As Hugging Face transformers runs them: blocks trimmed and left-stripped, loop controls, a `tojson` that does not escape
for HTML, `raise_exception`, `strftime_now`, and `{% generation %}` blocks, which matter to training only and are
transparent here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: only what is inside."""

    tags = {"generation"}  # noqa: RUF012  (the name and type that Jinja looks for)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Drop the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str, now: Callable[[], datetime]) -> Template:
    """Raises jinja2.TemplateSyntaxError. `now` is what `strftime_now` tells."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    return environment.from_string(source)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
