"""Every field of a request that can be wrong, and what the refusal names."""

from __future__ import annotations

import base64
import math
from typing import Any

import pytest

from meshfire.api.common.v1 import sampling_pb2
from meshfire.api.router.v1 import inference_service_pb2 as pb
from meshfire.api.router.v1 import work_service_pb2 as work_pb
from meshfire.errors import BadInput, InvalidPrompt, PromptTooLong, TestHooksOff
from services.router import wire
from services.router.admission import end_ids_of, resolve_sampling
from services.router.hooks import Hooks, hooks_in
from services.router.models import ModelFacts
from services.router.validation import RANGES, check_fit, check_form

FACTS = ModelFacts("m", "r", 64, 100, frozenset({99}), 16)


def request(**sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(model="m", text="x", sampling=sampling_pb2.SamplingParams(**sampling))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", 5.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", -2.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 2.1),
        ("num_logprobs", -1),
        ("num_logprobs", 21),
        ("num_prompt_logprobs", -1),
        ("num_prompt_logprobs", 21),
    ],
)
def test_a_number_outside_its_range_is_refused_by_its_path(field: str, value: float) -> None:
    with pytest.raises(BadInput) as caught:
        check_form(request(**{field: value}))
    assert caught.value.field == f"sampling.{field}"
    assert "expected" in caught.value.message


def test_every_optional_number_of_the_contract_has_a_range() -> None:
    optional = {field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields if field.has_presence}
    assert optional == RANGES.keys() | {"seed"}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"temperature": 5.0}, {"top_p": 1.0}, {"seed": -5}])
def test_borders_and_silence_are_fine(sampling: dict[str, Any]) -> None:
    check_form(request(**sampling))


@pytest.mark.parametrize(
    ("broken", "field"),
    [
        (pb.GenerateRequest(text="x"), "model"),
        (pb.GenerateRequest(model="m"), "prompt"),
        (pb.GenerateRequest(model="m", text=""), "text"),
        (pb.GenerateRequest(model="m", chat={}), "chat.messages"),
        (pb.GenerateRequest(model="m", token_ids={}), "token_ids.ids"),
        (request(stop=["x"] * 17), "sampling.stop"),
        (request(stop=["x", ""]), "sampling.stop[1]"),
        (request(logit_bias={3: 101.0}), "sampling.logit_bias[3]"),
        (request(logit_bias={3: math.nan}), "sampling.logit_bias[3]"),
        (request(min_tokens=5, max_tokens=4), "sampling.min_tokens"),
    ],
)
def test_form_is_checked_without_the_model(broken: pb.GenerateRequest, field: str) -> None:
    with pytest.raises(BadInput) as caught:
        check_form(broken)
    assert caught.value.field == field


def test_an_unknown_priority_is_refused() -> None:
    with pytest.raises(BadInput) as caught:
        check_form(pb.GenerateRequest(model="m", text="x", priority=9))  # type: ignore[arg-type]
    assert caught.value.field == "priority"


@pytest.mark.parametrize(
    ("asked", "prompt", "field"),
    [
        (request(stop_token_ids=[5, 100]), [1], "sampling.stop_token_ids[1]"),
        (request(logit_bias={-1: 1.0}), [1], "sampling.logit_bias[-1]"),
        (request(logit_bias={100: 1.0}), [1], "sampling.logit_bias[100]"),
        (pb.GenerateRequest(model="m", token_ids=pb.TokenIds(ids=[1, 100])), [1, 100], "token_ids.ids[1]"),
        (pb.GenerateRequest(model="m", token_ids=pb.TokenIds(ids=[-1])), [-1], "token_ids.ids[0]"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(asked: pb.GenerateRequest, prompt: list[int], field: str) -> None:
    with pytest.raises(BadInput) as caught:
        check_fit(asked, FACTS, prompt)
    assert caught.value.field == field


def test_a_prompt_must_leave_room_for_one_token() -> None:
    check_fit(request(), FACTS, [1] * 63)
    with pytest.raises(PromptTooLong) as caught:
        check_fit(request(), FACTS, [1] * 64)
    assert caught.value.metadata == {"num_prompt_tokens": "64", "context_tokens": "64"}
    with pytest.raises(InvalidPrompt):
        check_fit(request(), FACTS, [])


def test_sampling_is_resolved_within_the_context_and_with_a_seed() -> None:
    drawn = resolve_sampling(sampling_pb2.SamplingParams(), num_tokens_left=10)
    assert drawn.max_tokens == 10
    assert 0 <= drawn.seed < 2**53
    assert not drawn.HasField("temperature")
    given = resolve_sampling(sampling_pb2.SamplingParams(max_tokens=3, seed=-7), num_tokens_left=10)
    assert (given.max_tokens, given.seed) == (3, -7)


def test_ignoring_end_tokens_leaves_those_that_the_caller_named() -> None:
    assert end_ids_of(sampling_pb2.SamplingParams(stop_token_ids=[1]), FACTS) == {1, 99}
    assert end_ids_of(sampling_pb2.SamplingParams(stop_token_ids=[1], ignore_eos=True), FACTS) == {1}


class TestHooksOfACall:
    def test_both_are_read_when_allowed(self) -> None:
        script = base64.b64encode(b'{"pieces": []}').decode()
        metadata = [("x-meshfire-script", script), ("x-meshfire-fault", "kv:corrupt"), ("other", "1")]
        assert hooks_in(metadata, allowed=True) == Hooks('{"pieces": []}', "kv:corrupt")
        assert hooks_in([("other", "1")], allowed=False) == Hooks()

    @pytest.mark.parametrize(
        ("header", "value"),
        [
            ("x-meshfire-script", "not base64!"),
            ("x-meshfire-script", base64.b64encode(b"{").decode()),
            ("x-meshfire-script", base64.b64encode(b"[1]").decode()),
            ("x-meshfire-script", base64.b64encode(b"\xff").decode()),
            ("x-meshfire-script", ""),
            ("x-meshfire-script", base64.b64encode(b"[" * 100_000).decode()),
            ("x-meshfire-fault", "decode:explode"),
        ],
    )
    def test_a_malformed_one_is_refused_by_its_header(self, header: str, value: str) -> None:
        with pytest.raises(BadInput) as caught:
            hooks_in([(header, value)], allowed=True)
        assert caught.value.field == header
        with pytest.raises(TestHooksOff):
            hooks_in([(header, value)], allowed=False)


HELLO: dict[str, Any] = {
    "worker_id": "w",
    "role": work_pb.WORKER_ROLE_DECODE,
    "model": "m",
    "model_revision": "r",
    "geometry": {"num_layers": 1, "block_tokens": 16, "row_width": 4, "dtype": 1},
    "address": "host:1",
    "context_tokens": 64,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("field", "value"),
    [("worker_id", ""), ("role", 0), ("model", ""), ("address", ""), ("context_tokens", 0), ("vocab_size", -1)],
)
def test_a_senseless_hello_is_refused_by_its_field(field: str, value: Any) -> None:
    wire.worker_from(work_pb.WorkerHello(**HELLO))
    with pytest.raises(BadInput) as caught:
        wire.worker_from(work_pb.WorkerHello(**(HELLO | {field: value})))
    assert caught.value.field == f"hello.{field}"
