"""OutputRule on the wire. Schemas travel as JSON text; whether a rule can be enforced is the compiler's to say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from meshfire.api.common.v1 import output_rule_pb2 as pb
from meshfire.errors import BadInput
from meshfire.grammar.rules import (
    CallsRule,
    ChoiceRule,
    ContentRule,
    FunctionRule,
    GrammarRule,
    JsonRule,
    OutputRule,
    RegexRule,
)

#: JSON text of one schema; larger ones are refused unread.
MAX_SCHEMA_BYTES = 256 * 1024

_Mode = Literal["auto", "required", "none"]
_MODES: Mapping[_Mode, pb.CallsMode.ValueType] = {
    "auto": pb.CALLS_MODE_AUTO,
    "required": pb.CALLS_MODE_REQUIRED,
    "none": pb.CALLS_MODE_NONE,
}
_MODES_IN: Mapping[pb.CallsMode.ValueType, _Mode] = {
    pb.CALLS_MODE_UNSPECIFIED: "auto",
    **{value: mode for mode, value in _MODES.items()},
}


def to_wire(rule: OutputRule) -> pb.OutputRule:
    """As a message; a function without a schema of its own gets the chat's."""
    message = pb.OutputRule()
    if rule.content is not None:
        message.content.CopyFrom(_content_to_wire(rule.content))
    if rule.calls is not None:
        message.calls.mode = _MODES[rule.calls.mode]
        message.calls.single = not rule.calls.parallel
        for one in rule.calls.functions:
            parameters = "" if one.parameters is None else json.dumps(one.parameters, ensure_ascii=False)
            message.calls.functions.add(name=one.name, parameters_json=parameters)
    return message


def from_wire(message: pb.OutputRule, path: str = "rule") -> OutputRule:
    """From a message. Raises BadInput naming the field below `path`, or as the caller calls it."""
    content = content_from_wire(message.content, f"{path}.content") if message.HasField("content") else None
    calls = None
    if message.HasField("calls"):
        functions = tuple(
            FunctionRule(one.name, _parameters(one, f"{path}.calls.functions[{index}]"), f"{path}.calls")
            for index, one in enumerate(message.calls.functions)
        )
        calls = CallsRule(calls_mode(message.calls, path), functions, not message.calls.single)
    return OutputRule(content, calls)


def calls_mode(message: pb.CallsRule, path: str = "rule") -> _Mode:
    """How far the output is free to call tools. Raises BadInput for a mode that is not known."""
    mode = _MODES_IN.get(message.mode)
    if mode is None:
        raise BadInput(f"mode {message.mode} is not known", field=f"{path}.calls.mode")
    return mode


def content_from_wire(message: pb.ContentRule, path: str) -> ContentRule:
    """From a message. Raises BadInput."""
    kind = message.WhichOneof("rule")
    field = message.field or f"{path}.{kind}"
    match kind:
        case "json_schema":
            return JsonRule(schema_from(message.json_schema, field), field)
        case "regex":
            return RegexRule(message.regex, field)
        case "grammar":
            return GrammarRule(message.grammar, field)
        case "choices":
            return ChoiceRule(tuple(message.choices.texts), field)
        case None:
            raise BadInput("a rule for the content that says nothing", field=path)


def schema_from(text: str, field: str) -> Mapping[str, Any] | bool:
    """A schema that came as JSON text. Raises BadInput."""
    if len(text) > MAX_SCHEMA_BYTES:
        raise BadInput(f"{field}: a schema of more than {MAX_SCHEMA_BYTES} bytes", field=field)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{field}: no JSON: {error}", field=field) from None
    if not isinstance(schema, dict | bool):
        raise BadInput(f"{field}: a schema is an object, true or false", field=field)
    return schema


def _parameters(function: pb.CallableFunction, path: str) -> Mapping[str, Any] | bool | None:
    return schema_from(function.parameters_json, f"{path}.parameters_json") if function.parameters_json else None


def _content_to_wire(rule: ContentRule) -> pb.ContentRule:
    match rule:
        case JsonRule(schema, field):
            return pb.ContentRule(json_schema=json.dumps(schema, ensure_ascii=False), field=field)
        case RegexRule(pattern, field):
            return pb.ContentRule(regex=pattern, field=field)
        case GrammarRule(source, field):
            return pb.ContentRule(grammar=source, field=field)
        case ChoiceRule(options, field):
            return pb.ContentRule(choices=pb.Choices(texts=options), field=field)
