"""The tokenizer service through a real gRPC server on a free port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tokenizers import Tokenizer

from meshfire.api.tokenizer.v1 import tokenizer_service_pb2 as pb
from meshfire.api.tokenizer.v1 import tokenizer_service_pb2_grpc as rpc
from meshfire.discovery.memory import MemoryRegistry, MemorySpace
from meshfire.errors import (
    BadInput,
    CheckpointError,
    Draining,
    InvalidPrompt,
    MeshfireError,
    TestHooksOff,
    UnknownModel,
)
from meshfire.modelstore.made_tokenizer import write_tokenizer
from meshfire.rpc.status import from_rpc_error
from meshfire.runtime.serve import Mesh, running
from meshfire.telemetry.setup import configure
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.server import build

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
VOCAB_SIZE = 1024


@dataclass
class Served:
    """A running service and a stub to it."""

    mesh: Mesh
    stub: rpc.TokenizerServiceAsyncStub
    spans: InMemorySpanExporter
    space: MemorySpace

    async def detokenize(self, frames: Iterable[pb.DetokenizeRequest]) -> list[pb.DetokenizeResponse]:
        try:
            return [one async for one in self.stub.Detokenize(iter(frames))]
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    write_tokenizer(made, VOCAB_SIZE)
    return made


@pytest.fixture(scope="module")
def library(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@asynccontextmanager
async def serving(models: dict[str, Path], **settings: Any) -> AsyncIterator[Served]:
    space, spans = MemorySpace(), InMemorySpanExporter()
    made = TokenizerSettings(models=models, discovery_lag_s=0, drain_s=5, instance_id="t", **settings)
    telemetry = configure("tokenizer", "t", exporter=spans)
    async with running("tokenizer", build, made, registry=MemoryRegistry(space), telemetry=telemetry) as mesh:
        yield Served(mesh, rpc.TokenizerServiceStub(mesh.channels.get(mesh.address)), spans, space)


@pytest.fixture
async def served(directory: Path) -> AsyncIterator[Served]:
    async with serving({"tiny": directory, "@mf/second": directory}, test_hooks=True) as one:
        yield one


def chat(*turns: tuple[str, str], **more: Any) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role=role, content=content) for role, content in turns], **more)


def start(**fields: Any) -> pb.DetokenizeRequest:
    return pb.DetokenizeRequest(start=pb.DetokenizeStart(model="tiny", **fields))


def tokens(*token_ids: int, **fields: Any) -> pb.DetokenizeRequest:
    return pb.DetokenizeRequest(tokens=pb.DetokenizeTokens(token_ids=token_ids, **fields))


async def test_a_chat_is_rendered_and_encoded(served: Served, library: Tokenizer) -> None:
    response = await served.stub.Tokenize(pb.TokenizeRequest(model="tiny", chat=chat(("user", "Hi"))))
    shown = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert library.decode(list(response.token_ids), skip_special_tokens=False) == shown
    closed = pb.TokenizeRequest(model="tiny", chat=chat(("user", "Hi"), omit_generation_prompt=True))
    shorter = await served.stub.Tokenize(closed)
    assert list(shorter.token_ids) == list(response.token_ids)[: len(shorter.token_ids)]
    assert len(shorter.token_ids) < len(response.token_ids)


@pytest.mark.parametrize("inline_chars", [0, 4_000])
async def test_a_text_is_encoded_as_it_is_on_the_loop_or_off_it(
    directory: Path, library: Tokenizer, inline_chars: int
) -> None:
    async with serving({"tiny": directory}, inline_chars=inline_chars) as served:
        text = "the <|im_end|> of ümlauts 🦫"
        response = await served.stub.Tokenize(pb.TokenizeRequest(model="tiny", text=text))
        assert library.decode(list(response.token_ids), skip_special_tokens=False) == text
        assert library.token_to_id("<|im_end|>") not in response.token_ids


@pytest.mark.parametrize(
    ("request_", "error", "field"),
    [
        (pb.TokenizeRequest(model="other", text="x"), UnknownModel, "model"),
        (pb.TokenizeRequest(model="tiny"), BadInput, "input"),
        (pb.TokenizeRequest(model="tiny", chat=pb.Chat()), InvalidPrompt, "chat.messages"),
        (
            pb.TokenizeRequest(model="tiny", chat=chat(("user", "x"), ("wizard", "x"))),
            InvalidPrompt,
            "chat.messages[1].role",
        ),
        *(
            (
                pb.TokenizeRequest(model="tiny", chat=chat(("user", "x"), template_kwargs_json=kwargs)),
                InvalidPrompt,
                "chat.template_kwargs_json",
            )
            for kwargs in ("{", "[]", "[" * 50_000, '{"messages": []}')
        ),
    ],
)
async def test_a_bad_prompt_is_refused_by_field(
    served: Served, request_: pb.TokenizeRequest, error: type[MeshfireError], field: str
) -> None:
    with pytest.raises(error) as caught:
        await served.stub.Tokenize(request_)
    assert type(caught.value) is error
    assert caught.value.field == field


async def test_a_model_without_a_template_takes_raw_prompts_only(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    async with serving({"raw": tmp_path}) as served:
        assert (await served.stub.Tokenize(pb.TokenizeRequest(model="raw", text="x"))).token_ids
        with pytest.raises(InvalidPrompt, match="no chat template") as caught:
            await served.stub.Tokenize(pb.TokenizeRequest(model="raw", chat=chat(("user", "x"))))
        assert caught.value.field == "chat"
        (facts,) = (await served.stub.Describe(pb.DescribeRequest())).vocabularies
        assert not facts.has_chat_template


@pytest.mark.parametrize("inline_tokens", [0, 4_096])
async def test_every_batch_of_tokens_gets_one_answer(directory: Path, library: Tokenizer, inline_tokens: int) -> None:
    async with serving({"tiny": directory}, inline_tokens=inline_tokens) as served:
        ids = library.encode("the 🦫!", add_special_tokens=False).ids
        end = library.token_to_id("<|im_end|>")
        frames = [tokens(one, lookup_ids=[one, end]) for one in ids]
        answers = await served.detokenize([start(), tokens(), *frames, tokens(end, last=True)])
        assert len(answers) == len(ids) + 2
        assert "".join(one.text for one in answers) == "the 🦫!"
        assert not any("\ufffd" in one.text for one in answers)
        assert b"".join(one.pieces[0] for one in answers[1:-1]).decode() == "the 🦫!"
        assert {one.pieces[1] for one in answers[1:-1]} == {b"<|im_end|>"}
        assert [one.num_tokens_used for one in answers] == [0, *[1] * len(ids), 1]


async def test_a_stop_text_ends_the_output_before_it(served: Served, library: Tokenizer) -> None:
    ids = library.encode("count RED-FLAG9 more", add_special_tokens=False).ids
    answers = await served.detokenize([start(stop=["RED-FLAG9"]), *(tokens(one) for one in ids)])
    assert "".join(one.text for one in answers) == "count "
    hits = [index for index, one in enumerate(answers) if one.HasField("stop_hit")]
    assert len(hits) == 1
    assert answers[hits[0]].stop_hit == "RED-FLAG9"
    assert [one.num_tokens_used for one in answers] == [1] * (hits[0] + 1) + [0] * (len(ids) - hits[0] - 1)


async def test_special_tokens_show_when_asked_for(served: Served, library: Tokenizer) -> None:
    end = library.token_to_id("<|im_end|>")
    (hidden,) = await served.detokenize([start(), tokens(end, last=True)])
    (shown,) = await served.detokenize([start(keep_special_tokens=True), tokens(end, last=True)])
    assert (hidden.text, shown.text) == ("", "<|im_end|>")


@pytest.mark.parametrize(
    ("frames", "error", "field"),
    [
        ([], BadInput, "start"),
        ([tokens(1)], BadInput, "start"),
        ([pb.DetokenizeRequest()], BadInput, "start"),
        ([start(), start()], BadInput, "tokens"),
        ([start(), pb.DetokenizeRequest()], BadInput, "tokens"),
        ([start(stop=["a", ""])], BadInput, "stop"),
        ([start(), tokens(VOCAB_SIZE)], BadInput, "token_ids"),
        ([start(), tokens(-1)], BadInput, "token_ids"),
        ([start(), tokens(1, lookup_ids=[VOCAB_SIZE])], BadInput, "token_ids"),
        ([pb.DetokenizeRequest(start=pb.DetokenizeStart(model="other"))], UnknownModel, "model"),
    ],
)
async def test_a_bad_stream_is_refused_by_field(
    served: Served, frames: list[pb.DetokenizeRequest], error: type[MeshfireError], field: str
) -> None:
    with pytest.raises(error) as caught:
        await served.detokenize(frames)
    assert type(caught.value) is error
    assert caught.value.field == field


async def test_vocabularies_are_described(served: Served, library: Tokenizer) -> None:
    both = (await served.stub.Describe(pb.DescribeRequest())).vocabularies
    assert [one.model for one in both] == ["tiny", "@mf/second"]
    (one,) = (await served.stub.Describe(pb.DescribeRequest(model="tiny"))).vocabularies
    assert one.vocab_size == library.get_vocab_size() == VOCAB_SIZE
    assert library.token_to_id("<|im_end|>") in one.end_token_ids
    assert len(one.checksum) == 64
    assert one.has_chat_template
    with pytest.raises(UnknownModel):
        await served.stub.Describe(pb.DescribeRequest(model="other"))


async def test_a_script_becomes_steps(served: Served, library: Tokenizer) -> None:
    script = json.dumps({"pieces_hex": ["f09f", "a6ab"], "end": "length"})
    response = await served.stub.TokenizeScript(pb.TokenizeScriptRequest(model="tiny", script_json=script))
    assert library.decode(list(response.token_ids)) == "🦫"
    assert not response.ends_with_eos
    with pytest.raises(BadInput) as caught:
        await served.stub.TokenizeScript(pb.TokenizeScriptRequest(model="tiny", script_json="{}"))
    assert caught.value.field == "script"


async def test_scripts_are_refused_without_test_hooks(directory: Path) -> None:
    async with serving({"tiny": directory}) as served:
        with pytest.raises(TestHooksOff):
            await served.stub.TokenizeScript(pb.TokenizeScriptRequest(model="tiny", script_json='{"pieces": []}'))


async def test_discovery_names_the_models(served: Served) -> None:
    async for instances in MemoryRegistry(served.space).watch("meshfire-tokenizer"):
        assert [one.metadata["model"] for one in instances] == ["tiny,@mf/second"]
        break


async def test_spans_hang_below_the_caller_and_count_tokens(served: Served) -> None:
    request = pb.TokenizeRequest(model="tiny", chat=chat(("user", "Hi")))
    response = await served.stub.Tokenize(request, metadata=(("traceparent", TRACE),))
    call = served.stub.Detokenize(iter([start(), tokens(1, 2), tokens(3)]), metadata=(("traceparent", TRACE),))
    assert len([one async for one in call]) == 2
    await asyncio.to_thread(served.mesh.telemetry.flush)
    spans = {one.name: one for one in served.spans.get_finished_spans()}
    assert all(f"{one.context.trace_id:032x}" == TRACE[3:35] for one in spans.values())
    encoded = dict(spans["tokenizer.tokenize"].attributes or {})
    assert (encoded["meshfire.messages"], encoded["meshfire.tokens.prompt"]) == (1, len(response.token_ids))
    assert dict(spans["tokenizer.detokenize"].attributes or {})["meshfire.tokens.output"] == 3


async def test_a_draining_service_ends_its_streams_and_takes_no_new_ones(directory: Path) -> None:
    first_answered, go_on = asyncio.Event(), asyncio.Event()
    answers: list[str] = []

    async def frames() -> AsyncIterator[pb.DetokenizeRequest]:
        yield start()
        yield tokens(ord("!") - 33)
        await go_on.wait()
        yield tokens(ord("!") - 33, last=True)

    async def read(stub: rpc.TokenizerServiceAsyncStub) -> None:
        async for answer in stub.Detokenize(frames()):
            answers.append(answer.text)
            first_answered.set()

    async with asyncio.TaskGroup() as group:
        async with serving({"tiny": directory}) as served:
            channel = grpc.aio.insecure_channel(served.mesh.address)
            group.create_task(read(rpc.TokenizerServiceStub(channel)), name="read")
            await first_answered.wait()
            group.create_task(new_call_is_refused_then(rpc.TokenizerServiceStub(channel), go_on), name="refused")
    assert len(answers) == 2
    await channel.close()


async def new_call_is_refused_then(stub: rpc.TokenizerServiceAsyncStub, go_on: asyncio.Event) -> None:
    while True:
        try:
            await stub.Tokenize(pb.TokenizeRequest(model="tiny", text="x"))
        except grpc.aio.AioRpcError as error:
            refusal = from_rpc_error(error)
            break
        await asyncio.sleep(0.01)
    go_on.set()
    assert isinstance(refusal, Draining)


async def test_a_model_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with serving({"tiny": tmp_path}):
            pass
    assert caught.group_contains(CheckpointError, match="has no tokenizer.json")


def test_models_come_from_the_environment_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFIRE_TOKENIZER_MODELS", '{"@cf/a/b": "/some/where"}')
    assert TokenizerSettings().models == {"@cf/a/b": Path("/some/where")}
