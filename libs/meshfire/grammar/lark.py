"""Rules as grammars of llguidance's Lark dialect, with Kimi's markers as token ids.

Owns the text of grammars. A schema's own errors are found by the compiler; here everything is only put together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance.gbnf_to_lark import gbnf_to_lark

from meshfire.errors import BadInput
from meshfire.grammar.patterns import ascii_classes, with_ascii_classes
from meshfire.grammar.rules import CallsRule, ChoiceRule, ContentRule, GrammarRule, JsonRule, RegexRule
from meshfire.text.kimi.markers import Marker, Markers

#: Between JSON tokens. Bounded: a model that likes white space could write it for ever.
_WHITE_SPACE = r"[ \t\r\n]{0,64}"
_GBNF = re.compile(r"^\s*root\s*::=", re.MULTILINE)


def answer_grammar(content: ContentRule | None, calls: CallsRule | None, markers: Markers | None) -> str:
    """Grammar of a whole answer: calls, content, or either. Raises BadInput naming a rule's field."""
    if isinstance(content, GrammarRule):
        if calls is not None and calls.mode != "none":
            raise BadInput("a grammar cannot be combined with tools", field=content.field)
        return _to_lark(content)
    rules: list[str] = []
    alternatives: list[str] = []
    if calls is not None and calls.mode != "none":
        alternatives.append("calls")
        rules += _calls(calls, markers)
    if content is not None:
        alternatives.append("content")
        rules.append(f"content: {_content(content)}")
    return "\n".join([f"start: {' | '.join(alternatives)}", *rules]) + "\n"


def _content(rule: JsonRule | RegexRule | ChoiceRule) -> str:
    if isinstance(rule, JsonRule):
        return json_terminal(rule.schema)
    if isinstance(rule, RegexRule):
        return f"/{_slashes_escaped(ascii_classes(_unanchored(rule.pattern)))}/"
    if not rule.options:
        raise BadInput("there is nothing to choose from", field=rule.field)
    return " | ".join(json.dumps(one, ensure_ascii=False) for one in rule.options)


def json_terminal(schema: Mapping[str, Any] | bool) -> str:
    """A schema inside a grammar."""
    whole: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {} if schema else {"not": {}}
    options = {"whitespace_pattern": _WHITE_SPACE}
    return f"%json {json.dumps({**with_ascii_classes(whole), 'x-guidance': options}, ensure_ascii=True)}"


def _calls(rule: CallsRule, markers: Markers | None) -> list[str]:
    """One or more calls of the declared functions, in Kimi's own markers."""
    if markers is None:
        raise BadInput("this model's vocabulary has no tool-call markers", field="rule.calls")
    if not rule.functions:
        raise BadInput("there is no tool to call", field="rule.calls")
    ids = {marker: f"<[{token_id}]>" for token_id, marker in markers.by_id.items()}
    names = " | ".join(f"call_{index}" for index in range(len(rule.functions)))
    many = "call+" if rule.parallel else "call"
    lines = [
        f"calls: {ids[Marker.SECTION_BEGIN]} {many} {ids[Marker.SECTION_END]}",
        f"call: {ids[Marker.CALL_BEGIN]} ({names}) {ids[Marker.CALL_END]}",
    ]
    for index, function in enumerate(rule.functions):
        header = json.dumps(f"functions.{function.name}:")
        arguments = json_terminal(_of_object(function.parameters))
        lines.append(f"call_{index}: {header} /[0-9]{{1,6}}/ {ids[Marker.ARGUMENTS_BEGIN]} {arguments}")
    return lines


def _of_object(parameters: Mapping[str, Any] | bool | None) -> Mapping[str, Any]:
    """Arguments are an object even where their schema does not say so."""
    return {**parameters, "type": "object"} if isinstance(parameters, Mapping) else {"type": "object"}


def _to_lark(rule: GrammarRule) -> str:
    if not _GBNF.search(rule.source):
        return rule.source
    try:
        return str(gbnf_to_lark(rule.source))
    except Exception as error:  # whatever its parser raises for a grammar that is none
        raise BadInput(f"the grammar cannot be read: {error}"[:300], field=rule.field) from error


def _unanchored(pattern: str) -> str:
    """The whole text is matched anyway; anchors at the ends say the same."""
    inner = pattern.removeprefix("^")
    escapes = len(inner) - len(inner.removesuffix("$").rstrip("\\")) - 1
    return inner[:-1] if inner.endswith("$") and escapes % 2 == 0 else inner


def _slashes_escaped(pattern: str) -> str:
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", r"\n")
