"""Kimi's chat language through the service: tools in, events out, whatever instance and batch sizes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from meshfire.api.tokenizer.v1 import tokenizer_service_pb2 as pb
from meshfire.api.tokenizer.v1 import tokenizer_service_pb2_grpc as rpc
from meshfire.discovery.memory import MemoryRegistry, MemorySpace
from meshfire.errors import MeshfireError
from meshfire.modelstore.made_tokenizer import write_tokenizer
from meshfire.runtime.serve import running
from meshfire.telemetry.setup import configure
from meshfire.text.tiktoken_tokenizer import TiktokenTokenizer
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.server import build
from tests.small_kimi import make_small_kimi

SEARCH = pb.Tool(
    name="search",
    description="Find.",
    parameters_json=json.dumps({"type": "object", "properties": {"query": {"type": "string"}}}),
)
OUTPUT = (
    "think of it</think>I look. <|tool_calls_section_begin|><|tool_call_begin|>functions.search:1"
    '<|tool_call_argument_begin|>{"query": "你好"}<|tool_call_end|><|tool_calls_section_end|>'
)


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[rpc.TokenizerServiceAsyncStub]:
    settings = TokenizerSettings(models={"kimi": directory}, discovery_lag_s=0, drain_s=5, instance_id="t")
    registry, telemetry = MemoryRegistry(MemorySpace()), configure("tokenizer", "t")
    async with running("tokenizer", build, settings, registry=registry, telemetry=telemetry) as mesh:
        yield rpc.TokenizerServiceStub(mesh.channels.get(mesh.address))


@pytest.fixture
def kimi_files(tmp_path: Path) -> Path:
    make_small_kimi(tmp_path)
    return tmp_path


def chat(*messages: pb.ChatMessage, thinking: bool | None = None, tools: bool = True) -> pb.TokenizeRequest:
    return pb.TokenizeRequest(
        model="kimi", chat=pb.Chat(messages=messages, tools=[SEARCH] if tools else [], thinking=thinking)
    )


ASKED = pb.ChatMessage(role="user", content="Find it")
CALLED = pb.ChatMessage(
    role="assistant", tool_calls=[pb.ToolCall(id="call_1", name="search", arguments_json='{"query": "x"}')]
)
FOUND = pb.ChatMessage(role="tool", tool_call_id="call_1", content="nothing")


async def test_a_prompt_says_how_its_output_is_to_be_read(kimi_files: Path) -> None:
    kimi = TiktokenTokenizer.load(kimi_files)
    async with serving(kimi_files) as stub:
        thinking = await stub.Tokenize(chat(ASKED, CALLED, FOUND))
        instant = await stub.Tokenize(chat(ASKED, thinking=False, tools=False))
        by_option = await stub.Tokenize(
            pb.TokenizeRequest(model="kimi", chat=pb.Chat(messages=[ASKED], template_kwargs_json='{"thinking": false}'))
        )
        raw = await stub.Tokenize(pb.TokenizeRequest(model="kimi", text="Find it"))
    text = b"".join(kimi.vocabulary.bytes_of(one) for one in thinking.token_ids).decode()
    assert "type search = (_: {\n  query?: string\n}) => any;" in text
    assert "<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>" in text
    assert "## Return of functions.search:0\nnothing" in text
    assert (thinking.output.state, thinking.output.first_call) == (pb.OUTPUT_STATE_REASONING, 1)
    assert list(thinking.output.tools) == [SEARCH]
    assert (instant.output.state, instant.output.first_call) == (pb.OUTPUT_STATE_CONTENT, 0)
    assert by_option == instant
    assert not raw.HasField("output")


@pytest.mark.parametrize("batch", [1, 3, 1000])
async def test_events(kimi_files: Path, batch: int) -> None:
    kimi = TiktokenTokenizer.load(kimi_files)
    output = pb.OutputFormat(state=pb.OUTPUT_STATE_REASONING, first_call=1, tools=[SEARCH])
    ids = kimi.encode_trusted(OUTPUT)
    cuts = [ids[at : at + batch] for at in range(0, len(ids), batch)]
    frames = [pb.DetokenizeRequest(start=pb.DetokenizeStart(model="kimi", output=output))]
    frames += [pb.DetokenizeRequest(tokens=pb.DetokenizeTokens(token_ids=one)) for one in cuts]
    frames.append(pb.DetokenizeRequest(tokens=pb.DetokenizeTokens(last=True)))
    async with serving(kimi_files) as stub:
        responses = [one async for one in stub.Detokenize(iter(frames))]
    events = [event for one in responses for event in one.events]
    assert not any(one.text for one in responses)
    assert "".join(one.reasoning for one in events) == "think of it"
    assert "".join(one.content for one in events) == "I look. "
    begins = [one.call_begin for one in events if one.HasField("call_begin")]
    assert begins == [pb.ToolCallBegin(index=0, id="functions.search:1", name="search")]
    assert "".join(one.call_arguments.text for one in events) == '{"query": "你好"}'
    assert events[-1].call_end == pb.ToolCallEnd(index=0, is_valid=True)


async def test_stop_texts_count_in_the_content_only(kimi_files: Path) -> None:
    kimi = TiktokenTokenizer.load(kimi_files)
    output = pb.OutputFormat(state=pb.OUTPUT_STATE_REASONING)
    start = pb.DetokenizeStart(model="kimi", output=output, stop=["STOP"])
    frames = [
        pb.DetokenizeRequest(start=start),
        pb.DetokenizeRequest(tokens=pb.DetokenizeTokens(token_ids=kimi.encode_trusted("a STOP b</think>c ST"))),
        pb.DetokenizeRequest(tokens=pb.DetokenizeTokens(token_ids=kimi.encode_plain("OP d"))),
        pb.DetokenizeRequest(tokens=pb.DetokenizeTokens(token_ids=kimi.encode_plain("more"), last=True)),
    ]
    async with serving(kimi_files) as stub:
        responses = [one async for one in stub.Detokenize(iter(frames))]
    events = [event for one in responses for event in one.events]
    assert "".join(one.reasoning for one in events) == "a STOP b"
    assert "".join(one.content for one in events) == "c "
    assert [(one.stop_hit, one.num_tokens_used) for one in responses[1:]] == [("STOP", 2), ("", 0)]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (chat(ASKED, FOUND), "chat.messages[1].tool_call_id"),
        (
            pb.TokenizeRequest(
                model="kimi", chat=pb.Chat(messages=[ASKED], tools=[pb.Tool(name="f", parameters_json="{")])
            ),
            "chat.tools[0].parameters_json",
        ),
        (
            pb.TokenizeRequest(model="kimi", chat=pb.Chat(messages=[ASKED], tools=[pb.Tool(description="d")])),
            "chat.tools[0].name",
        ),
    ],
)
async def test_a_wrong_chat_is_refused_by_name(kimi_files: Path, request_: pb.TokenizeRequest, field: str) -> None:
    async with serving(kimi_files) as stub:
        with pytest.raises(MeshfireError) as caught:
            await stub.Tokenize(request_)
    assert caught.value.field == field


async def test_tools_need_a_model_that_can_call_them(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 512)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    async with serving(tmp_path) as stub:
        plain = await stub.Tokenize(chat(ASKED, tools=False))
        assert not plain.HasField("output")
        with pytest.raises(MeshfireError) as caught:
            await stub.Tokenize(chat(ASKED))
    assert caught.value.field == "chat.tools"
