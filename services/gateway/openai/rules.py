"""Structured output of a request → the rule that the mesh enforces. Pure.

`ContentRule.field` names the parameter that asked, so that complaints are in the caller's words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from meshfire.api.common.v1 import output_rule_pb2 as pb
from services.gateway.errors import HttpError
from services.gateway.openai.schema import ChatRequest, Request
from services.gateway.openai.structured import (
    AllowedToolsChoice,
    FunctionChoice,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
)

_OBJECT = {"type": "object"}


def rule_of(request: Request) -> pb.OutputRule | None:
    """What the output must look like; None = nothing was asked. Raises HttpError (400) for two rules at once."""
    rules = list(_content_rules(request))
    if len(rules) > 1:
        param, other = rules[1].field.split(".")[0], rules[0].field.split(".")[0]
        raise HttpError(400, f"{param}: cannot be combined with {other}", param, "invalid_value")
    calls = _calls_rule(request) if isinstance(request, ChatRequest) else None
    return pb.OutputRule(content=rules[0] if rules else None, calls=calls) if rules or calls else None


def _content_rules(request: Request) -> Iterator[pb.ContentRule]:
    yield from _format_rule(request.response_format)
    if request.guided_json is not None:
        yield pb.ContentRule(json_schema=_text(request.guided_json, "guided_json"), field="guided_json")
    if request.guided_regex is not None:
        yield pb.ContentRule(regex=request.guided_regex, field="guided_regex")
    if request.guided_grammar is not None:
        yield pb.ContentRule(grammar=request.guided_grammar, field="guided_grammar")
    if request.guided_choice is not None:
        yield pb.ContentRule(choices=pb.Choices(texts=request.guided_choice), field="guided_choice")
    if request.structured_outputs is not None:
        yield _structured(request.structured_outputs)


def _format_rule(wanted: ResponseFormat | None) -> Iterator[pb.ContentRule]:
    if isinstance(wanted, JsonObjectFormat):
        yield pb.ContentRule(json_schema=json.dumps(_OBJECT), field="response_format")
    elif isinstance(wanted, JsonSchemaFormat):
        field = "response_format.json_schema" + (".schema" if wanted.is_wrapped else "")
        yield pb.ContentRule(json_schema=_text(wanted.schema_value, "response_format"), field=field)


def _structured(wanted: StructuredOutputs) -> pb.ContentRule:
    field = "structured_outputs"
    if wanted.json_ is not None:
        return pb.ContentRule(json_schema=_text(wanted.json_, field), field=f"{field}.json")
    if wanted.regex is not None:
        return pb.ContentRule(regex=wanted.regex, field=f"{field}.regex")
    if wanted.grammar is not None:
        return pb.ContentRule(grammar=wanted.grammar, field=f"{field}.grammar")
    if wanted.choice is not None:
        return pb.ContentRule(choices=pb.Choices(texts=wanted.choice), field=f"{field}.choice")
    return pb.ContentRule(json_schema=json.dumps(_OBJECT), field=f"{field}.json_object")


def _calls_rule(request: ChatRequest) -> pb.CallsRule | None:
    """None = as the model likes, of the tools that are declared."""
    choice, single = request.tool_choice, request.parallel_tool_calls is False
    match choice:
        case "none":
            return pb.CallsRule(mode=pb.CALLS_MODE_NONE) if request.tools else None
        case "required":
            return pb.CallsRule(mode=pb.CALLS_MODE_REQUIRED, single=single)
        case FunctionChoice(function=function):
            one = pb.CallableFunction(name=function.name)
            return pb.CallsRule(mode=pb.CALLS_MODE_REQUIRED, functions=[one], single=True)
        case AllowedToolsChoice(allowed_tools=allowed):
            mode = pb.CALLS_MODE_REQUIRED if allowed.mode == "required" else pb.CALLS_MODE_AUTO
            functions = [pb.CallableFunction(name=tool.function.name) for tool in allowed.tools]
            return pb.CallsRule(mode=mode, functions=functions, single=single)
        case _:
            return pb.CallsRule(mode=pb.CALLS_MODE_AUTO, single=True) if single and request.tools else None


def _text(schema: dict[str, Any] | bool | str, param: str) -> str:
    """As JSON text; a schema that came as text stays what it is."""
    if isinstance(schema, str):
        return schema
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except ValueError:  # a literal such as 1e999, which is valid JSON and no number
        raise HttpError(400, f"{param}: holds a number that is not finite", param, "invalid_value") from None
