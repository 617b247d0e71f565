"""Rules for outputs: checked once here, where compiling stalls no stream of tokens, and filled in for decode.

Owns what a rule means for a chat: declared functions, the start inside the reasoning. Whether it can be enforced is the
compiler's to say; errors name the field by its path in a TokenizeRequest or as the caller calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshfire.api.common.v1 import output_rule_pb2 as rule_pb
from meshfire.api.tokenizer.v1 import tokenizer_service_pb2 as pb
from meshfire.errors import BadInput
from meshfire.grammar.rules import CallsRule, FunctionRule, OutputRule
from meshfire.rpc import output_rule
from meshfire.text.kimi.output import State
from services.tokenizer.core import OutputStart, TextModel

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def filled_in(model: TextModel, request: pb.TokenizeRequest, start: OutputStart | None) -> rule_pb.OutputRule | None:
    """The rule of an output that begins at `start`; None = nothing is bound. Raises BadInput for one that cannot be.

    Declared tools alone are a rule, too: a call that the model makes is then one of them.
    """
    asked = output_rule.from_wire(request.rule) if request.HasField("rule") else OutputRule()
    calls = _calls(model, asked.calls, request.chat.tools)
    rule = replace(asked, calls=calls)
    if not rule.binds:
        return None
    model.compiler.compile(rule)
    filled = output_rule.to_wire(rule)
    filled.after_reasoning = start is not None and start.state is State.REASONING
    return filled


def _calls(model: TextModel, asked: CallsRule | None, tools: Sequence[pb.Tool]) -> CallsRule | None:
    if model.markers is None and (asked is None or asked.mode == "none"):
        return None
    if asked is None:
        asked = CallsRule("auto") if tools else None
    if asked is None or asked.mode == "none":
        return asked
    if not tools:
        raise BadInput("tool calls are asked for, and no tool is declared", field="rule.calls")
    return replace(asked, functions=tuple(_functions(model, asked, tools)))


def _functions(model: TextModel, asked: CallsRule, tools: Sequence[pb.Tool]) -> list[FunctionRule]:
    declared = {tool.name: _function(model, index, tool) for index, tool in enumerate(tools)}
    for index, one in enumerate(asked.functions):
        if one.name not in declared:
            field = f"rule.calls.functions[{index}].name"
            raise BadInput(f"there is no tool {one.name!r}; there are {', '.join(declared)}", field=field)
    wanted = {one.name for one in asked.functions} or declared.keys()
    return [function for name, function in declared.items() if name in wanted]


def _function(model: TextModel, index: int, tool: pb.Tool) -> FunctionRule:
    """A schema that cannot be enforced binds nothing but the kind of value, unless the tool is strict."""
    field = f"chat.tools[{index}].parameters_json"
    if not tool.parameters_json:
        return FunctionRule(tool.name, _ANY_OBJECT, field)
    declared = output_rule.schema_from(tool.parameters_json, field)
    parameters = {**(declared if isinstance(declared, Mapping) else {}), "type": "object"}
    if not tool.strict and model.compiler.refuses(parameters):
        return FunctionRule(tool.name, _ANY_OBJECT, field)
    return FunctionRule(tool.name, parameters, field)
