"""Rules for outputs through the service: checked once, filled in for decode, refused by field; other calls go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from meshfire.api.common.v1 import output_rule_pb2 as rule_pb
from meshfire.api.tokenizer.v1 import tokenizer_service_pb2 as pb
from meshfire.api.tokenizer.v1 import tokenizer_service_pb2_grpc as rpc
from meshfire.discovery.memory import MemoryRegistry, MemorySpace
from meshfire.errors import BadInput
from meshfire.modelstore.made_tokenizer import write_tokenizer
from meshfire.rpc import output_rule
from meshfire.runtime.serve import running
from meshfire.telemetry.setup import configure
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.server import build
from tests.small_kimi import make_small_kimi

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ODD = {"type": "object", "properties": {"n": {"type": "array", "uniqueItems": True}}}


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[rpc.TokenizerServiceAsyncStub]:
    settings = TokenizerSettings(models={"kimi": directory}, discovery_lag_s=0, drain_s=5, instance_id="t")
    registry, telemetry = MemoryRegistry(MemorySpace()), configure("tokenizer", "t")
    async with running("tokenizer", build, settings, registry=registry, telemetry=telemetry) as mesh:
        yield rpc.TokenizerServiceStub(mesh.channels.get(mesh.address))


@pytest.fixture
async def stub(tmp_path: Path) -> AsyncIterator[rpc.TokenizerServiceAsyncStub]:
    make_small_kimi(tmp_path)
    async with serving(tmp_path) as stub:
        yield stub


def tool(name: str, parameters: Any = None, *, strict: bool = False) -> pb.Tool:
    return pb.Tool(name=name, parameters_json=json.dumps(parameters) if parameters else "", strict=strict)


def asked(*tools: pb.Tool, thinking: bool = True, **rule: Any) -> pb.TokenizeRequest:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")], tools=tools, thinking=thinking)
    return pb.TokenizeRequest(model="kimi", chat=chat, rule=rule_pb.OutputRule(**rule) if rule else None)


def calls(mode: rule_pb.CallsMode.ValueType, *names: str, single: bool = False) -> rule_pb.CallsRule:
    return rule_pb.CallsRule(
        mode=mode, functions=[rule_pb.CallableFunction(name=name) for name in names], single=single
    )


async def test_declared_tools_are_a_rule_by_themselves(stub: rpc.TokenizerServiceAsyncStub) -> None:
    response = await stub.Tokenize(asked(tool("add", NUMBER), tool("stop"), tool("odd", ODD)))
    filled = response.rule
    assert (filled.calls.mode, filled.after_reasoning) == (rule_pb.CALLS_MODE_AUTO, True)
    schemas = {one.name: json.loads(one.parameters_json) for one in filled.calls.functions}
    assert schemas == {"add": NUMBER, "stop": {"type": "object"}, "odd": {"type": "object"}}
    assert not (await stub.Tokenize(asked())).HasField("rule"), "nothing is bound"
    assert not (await stub.Tokenize(asked(tool("add", NUMBER), thinking=False))).rule.after_reasoning


async def test_required_and_allowed_functions_are_filled_in(stub: rpc.TokenizerServiceAsyncStub) -> None:
    tools = [tool("add", NUMBER), tool("stop")]
    every = await stub.Tokenize(asked(*tools, calls=calls(rule_pb.CALLS_MODE_REQUIRED)))
    assert [one.name for one in every.rule.calls.functions] == ["add", "stop"]
    one = await stub.Tokenize(asked(*tools, calls=calls(rule_pb.CALLS_MODE_REQUIRED, "stop", single=True)))
    assert [one.name for one in one.rule.calls.functions] == ["stop"]
    assert one.rule.calls.single
    none = await stub.Tokenize(asked(*tools, calls=calls(rule_pb.CALLS_MODE_NONE)))
    assert none.rule.calls.mode == rule_pb.CALLS_MODE_NONE


async def test_a_rule_needs_no_prompt_to_be_checked(stub: rpc.TokenizerServiceAsyncStub) -> None:
    rule = rule_pb.OutputRule(content=rule_pb.ContentRule(regex="a+", field="mine"))
    response = await stub.Tokenize(pb.TokenizeRequest(model="kimi", rule=rule))
    assert (response.rule.content.regex, response.rule.after_reasoning, list(response.token_ids)) == ("a+", False, [])
    assert output_rule.to_wire(output_rule.from_wire(response.rule)) == response.rule


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (asked(content=rule_pb.ContentRule()), "rule.content"),
        (asked(content=rule_pb.ContentRule(json_schema="{")), "rule.content.json_schema"),
        (asked(content=rule_pb.ContentRule(json_schema="[1]")), "rule.content.json_schema"),
        (asked(content=rule_pb.ContentRule(json_schema="[" * 100_000)), "rule.content.json_schema"),
        (asked(content=rule_pb.ContentRule(json_schema='{"not": {}}', field="mine")), "mine.not"),
        (asked(content=rule_pb.ContentRule(choices=rule_pb.Choices())), "rule.content.choices"),
        (asked(calls=rule_pb.CallsRule(mode=rule_pb.CALLS_MODE_REQUIRED)), "rule.calls"),
        (asked(calls=rule_pb.CallsRule(mode=9)), "rule.calls.mode"),  # type: ignore[arg-type]
        (asked(tool("f"), calls=calls(rule_pb.CALLS_MODE_AUTO, "g")), "rule.calls.functions[0].name"),
        (asked(tool("a"), tool("f", ODD, strict=True)), "chat.tools[1].parameters_json.properties.n.uniqueItems"),
    ],
)
async def test_what_cannot_be_is_refused_by_field(
    stub: rpc.TokenizerServiceAsyncStub, request_: pb.TokenizeRequest, field: str
) -> None:
    with pytest.raises(BadInput) as caught:
        await stub.Tokenize(request_)
    assert caught.value.field == field
    assert len(caught.value.message) < 600


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


HOSTILE: list[Any] = [
    deep(99),
    deep(400),
    {"enum": ["x" * 100] * 5000},
    {"enum": list(range(30_000))},
    {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(60)]},
    {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "("} for i in range(2000)}},
    {"$ref": "#"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"type": "integer", "minimum": -(10**40), "maximum": 10**40},
]


async def test_hostile_schemas_are_refused_and_streams_go_on(stub: rpc.TokenizerServiceAsyncStub) -> None:
    """Nothing waits for them: texts are encoded meanwhile."""
    refused = [
        asyncio.create_task(
            _refusal(stub, asked(content=rule_pb.ContentRule(json_schema=json.dumps(schema), field="mine")))
        )
        for schema in HOSTILE
    ]
    answered = 0
    while not all(one.done() for one in refused):
        await stub.Tokenize(pb.TokenizeRequest(model="kimi", text="x"))
        answered += 1
    assert answered > len(HOSTILE)
    assert all((one.result() or "").startswith("mine") for one in refused)


async def _refusal(stub: rpc.TokenizerServiceAsyncStub, request: pb.TokenizeRequest) -> str | None:
    with pytest.raises(BadInput) as caught:
        await stub.Tokenize(request)
    return caught.value.field


async def test_a_model_without_kimi_s_markers_takes_rules_for_content_only(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 512)
    async with serving(tmp_path) as stub:
        text = pb.TokenizeRequest(model="kimi", text="x", rule=rule_pb.OutputRule(calls=calls(rule_pb.CALLS_MODE_NONE)))
        assert not (await stub.Tokenize(text)).HasField("rule")
        text.rule.CopyFrom(rule_pb.OutputRule(content=rule_pb.ContentRule(regex="a+")))
        assert (await stub.Tokenize(text)).rule.content.regex == "a+"
        text.rule.CopyFrom(rule_pb.OutputRule(calls=calls(rule_pb.CALLS_MODE_REQUIRED)))
        with pytest.raises(BadInput):
            await stub.Tokenize(text)
