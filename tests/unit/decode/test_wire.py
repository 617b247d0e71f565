"""Leases from outside: what is right becomes an order, what is wrong is refused with its field named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from meshfire.api.common.v1 import sampling_pb2
from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.errors import BadInput, DeadlineExceeded, InvalidPrompt, MeshfireError, PromptTooLong, TestHooksOff
from services.decode.ending import Ending, FinishReason, OutputLimits, Script
from services.decode.wire import WorkerFacts, order_from

FACTS = WorkerFacts("m", vocab_size=100, max_context_tokens=8, end_token_ids=(98, 99), generation_defaults={})


def lease(**sampling: object) -> pb.Lease:
    params = sampling_pb2.SamplingParams(**{"max_tokens": 4, "seed": 1, **sampling})  # type: ignore[arg-type]
    decode = pb.DecodeWork(
        token_ids=[1, 2, 3], num_prompt_tokens=2, kv_lease_id="kv", kv_address="host:1", sampling=params
    )
    return pb.Lease(request_id="r", epoch=2, remaining_ms=1500, traceparent="tp", decode=decode)


def test_a_lease_becomes_an_order() -> None:
    order = order_from("router", lease(temperature=0.5, stop_token_ids=[7], num_logprobs=3), FACTS, now=10.0)
    assert (order.key.router_id, order.key.request_id, order.key.epoch) == ("router", "r", 2)
    assert order.deadline == 11.5
    assert (order.token_ids, order.prompt_ids) == ((1, 2, 3), (1, 2))
    assert (order.source.address, order.source.kv_lease_id, order.source.epoch) == ("host:1", "kv", 2)
    assert (order.params.temperature, order.params.num_logprobs, order.params.seed) == (0.5, 3, 1)
    assert order.limits == OutputLimits(4, 8, frozenset({7, 98, 99}))


def test_unset_fields_take_the_model_s_defaults_and_set_ones_do_not() -> None:
    facts = replace(FACTS, generation_defaults={"temperature": 0.6, "top_p": 0.95, "do_sample": True})
    params = order_from("router", lease(top_p=0.5), facts, now=0).params
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.5, 0)
    assert order_from("router", lease(temperature=0.0), facts, now=0).params.temperature == 0.0


def test_a_model_that_does_not_sample_is_greedy_unless_the_request_says_otherwise() -> None:
    facts = replace(FACTS, generation_defaults={"temperature": 0.6, "do_sample": False})
    assert order_from("router", lease(), facts, now=0).params.temperature == 0.0
    assert order_from("router", lease(temperature=0.5), facts, now=0).params.temperature == 0.5


def test_ignored_end_tokens_do_not_end_the_output_but_the_request_s_own_do() -> None:
    order = order_from("router", lease(ignore_eos=True, stop_token_ids=[7, 98]), FACTS, now=0)
    assert order.limits.end_token_ids == {7, 98}


Change = Callable[[pb.Lease], object]


@pytest.mark.parametrize(
    ("change", "error", "field"),
    [
        (lambda one: one.prefill.SetInParent(), BadInput, "work"),
        (lambda one: one.ClearField("decode"), BadInput, "work"),
        (lambda one: setattr(one, "remaining_ms", 0), DeadlineExceeded, None),
        (lambda one: one.decode.ClearField("token_ids"), InvalidPrompt, "token_ids"),
        (lambda one: one.decode.token_ids.append(100), BadInput, "token_ids"),
        (lambda one: one.decode.token_ids.append(-1), BadInput, "token_ids"),
        (lambda one: one.decode.token_ids.extend([1] * 6), PromptTooLong, "token_ids"),
        (lambda one: setattr(one.decode, "num_prompt_tokens", 0), BadInput, "num_prompt_tokens"),
        (lambda one: setattr(one.decode, "num_prompt_tokens", 4), BadInput, "num_prompt_tokens"),
        (lambda one: setattr(one.decode, "kv_lease_id", ""), BadInput, "kv_lease_id"),
        (lambda one: setattr(one.decode, "kv_address", ""), BadInput, "kv_address"),
        (lambda one: one.decode.sampling.ClearField("max_tokens"), BadInput, "max_tokens"),
        (lambda one: setattr(one.decode.sampling, "max_tokens", 0), BadInput, "max_tokens"),
        (lambda one: setattr(one.decode.sampling, "temperature", math.nan), BadInput, "temperature"),
        (lambda one: setattr(one.decode.sampling, "top_p", 0.0), BadInput, "top_p"),
        (lambda one: setattr(one.decode.sampling, "num_logprobs", 21), BadInput, "num_logprobs"),
        (lambda one: one.decode.sampling.stop_token_ids.append(100), BadInput, "stop_token_ids"),
        (lambda one: one.decode.sampling.logit_bias.update({100: 1.0}), BadInput, "logit_bias"),
        (lambda one: one.decode.sampling.logit_bias.update({5: 101.0}), BadInput, "logit_bias[5]"),
        (lambda one: setattr(one.decode, "scripted", True), TestHooksOff, "script_token_ids"),
        (lambda one: setattr(one, "fault", "decode:kill"), TestHooksOff, "fault"),
    ],
)
def test_what_is_wrong_is_refused_with_its_field(change: Change, error: type[MeshfireError], field: str | None) -> None:
    wrong = lease()
    change(wrong)
    with pytest.raises(error) as refused:
        order_from("router", wrong, FACTS, now=0)
    assert type(refused.value) is error
    assert refused.value.field == field


def test_a_scripted_token_outside_the_vocabulary_is_refused() -> None:
    scripted = lease()
    scripted.decode.scripted = True
    scripted.decode.script_token_ids.append(100)
    with pytest.raises(BadInput, match="script_token_ids"):
        order_from("router", scripted, replace(FACTS, hooks_on=True), now=0)


def test_a_script_for_a_model_without_end_tokens_stops_without_naming_one() -> None:
    limits = OutputLimits(10, 10, frozenset(), script=Script((5,), None, ends_with_eos=True))
    assert limits.ending_before(0, 1) is None
    assert limits.ending_before(1, 2) == Ending(FinishReason.STOP)


def test_max_tokens_cuts_a_script_short() -> None:
    limits = OutputLimits(1, 10, frozenset(), script=Script((5, 6), 9, ends_with_eos=True))
    assert limits.ending_before(1, 2) == Ending(FinishReason.LENGTH)
