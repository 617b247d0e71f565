"""Leases as orders: checks everything that comes from outside, once, and names the field of what is wrong.

Owns the rules of a decode lease and how unset sampling fields are filled: from the model's generation_config.json, else
by the defaults of SamplingParams. Decides nothing about when or where an order runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from meshfire.api.common.v1 import sampling_pb2
from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.errors import BadInput, DeadlineExceeded, InvalidPrompt, PromptTooLong, TestHooksOff
from meshfire.model.sampling import SamplingParams
from meshfire.rpc import output_rule
from meshfire.worker.faults import rehearsed
from meshfire.worker.lease_key import LeaseKey
from services.decode.ending import OutputLimits, Script
from services.decode.kv_reader import KvSource
from services.decode.order import Order
from services.decode.wanted import WantedText

#: fields that generation_config.json may set
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_PLAIN = ("min_tokens", *_MODEL_DEFAULTS, "seed", "presence_penalty", "frequency_penalty", "num_logprobs")


@dataclass(frozen=True)
class WorkerFacts:
    """What orders are held against."""

    #: name under which the model is served
    model: str
    vocab_size: int
    #: tokens of prompt and output at most: context window and KV of this worker
    max_context_tokens: int
    end_token_ids: tuple[int, ...]
    #: sampling fields of the model's generation_config.json
    generation_defaults: Mapping[str, Any]
    #: whether scripts and faults are allowed
    hooks_on: bool = False


def order_from(router_id: str, lease: pb.Lease, facts: WorkerFacts, *, now: float) -> Order:
    """A lease as an order; `now` is time.monotonic().

    Raises BadInput, InvalidPrompt, PromptTooLong, DeadlineExceeded, TestHooksOff.
    """
    if lease.WhichOneof("work") != "decode":
        raise BadInput("a decode worker was sent a lease that is not decode work", field="work")
    if lease.remaining_ms <= 0:
        raise DeadlineExceeded("the request's deadline had passed before the lease arrived")
    work = lease.decode
    _check_tokens(work, facts)
    params = sampling_from(work.sampling, facts)
    return Order(
        key=LeaseKey(router_id, lease.request_id, lease.epoch),
        token_ids=tuple(work.token_ids),
        num_prompt_tokens=work.num_prompt_tokens,
        cache_salt=work.cache_salt,
        source=_source_from(work, lease.epoch),
        deadline=now + lease.remaining_ms / 1e3,
        traceparent=lease.traceparent,
        params=params,
        limits=_limits_from(work, params, facts),
        fault=rehearsed(lease.fault, epoch=lease.epoch, hooks_on=facts.hooks_on),
        num_prompt_logprobs=_num_prompt_logprobs_from(work),
        rule=output_rule.from_wire(work.rule) if work.HasField("rule") else None,
        in_reasoning=work.rule.after_reasoning,
        wanted=_wanted_from(work, facts),
    )


def sampling_from(message: sampling_pb2.SamplingParams, facts: WorkerFacts) -> SamplingParams:
    """How tokens are chosen. Raises BadInput, naming the field, for what is out of range or not in the vocabulary."""
    if not message.HasField("max_tokens"):
        raise BadInput("max_tokens is not set", field="max_tokens")
    _check_ids("logit_bias", message.logit_bias, facts)
    _check_ids("stop_token_ids", message.stop_token_ids, facts)
    chosen = {field.name: value for field, value in message.ListFields() if field.name in _PLAIN}
    return SamplingParams(
        **(_model_defaults(facts.generation_defaults) | chosen),
        max_tokens=message.max_tokens or None,
        logit_bias=dict(message.logit_bias),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        end_token_ids=() if message.ignore_eos else facts.end_token_ids,
    )


def _model_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """As transformers reads them: without do_sample the likeliest token is taken, whatever the temperature."""
    defaults = {name: generation[name] for name in _MODEL_DEFAULTS if generation.get(name) is not None}
    return defaults | {"temperature": 0.0} if generation.get("do_sample") is False else defaults


def _source_from(work: pb.DecodeWork, epoch: int) -> KvSource | None:
    """None: the lease came without KV."""
    if not work.kv_lease_id:
        if work.kv_address:
            raise BadInput("a kv_address without kv_lease_id", field="kv_lease_id")
        return None
    if not work.kv_address:
        raise BadInput("a decode lease without kv_address", field="kv_address")
    if work.sampling.max_tokens < 1:
        raise BadInput("max_tokens is 0 and the prompt is computed: nothing is left to do", field="max_tokens")
    return KvSource(work.kv_address, work.kv_lease_id, epoch)


def _num_prompt_logprobs_from(work: pb.DecodeWork) -> int | None:
    if not work.HasField("num_prompt_logprobs"):
        return None
    if work.kv_lease_id:
        raise BadInput("log-probabilities of a prompt that is not computed here", field="num_prompt_logprobs")
    return work.num_prompt_logprobs


def _limits_from(work: pb.DecodeWork, params: SamplingParams, facts: WorkerFacts) -> OutputLimits:
    return OutputLimits(
        max_tokens=work.sampling.max_tokens,
        max_context_tokens=facts.max_context_tokens,
        end_token_ids=frozenset((*params.end_token_ids, *params.stop_token_ids)),
        rule_end_ids=frozenset(facts.end_token_ids) if work.HasField("rule") else frozenset(),
        min_tokens=params.min_tokens,
        script=_script_from(work, facts),
    )


def _script_from(work: pb.DecodeWork, facts: WorkerFacts) -> Script | None:
    if not work.scripted:
        return None
    if not facts.hooks_on:
        raise TestHooksOff("this worker runs without test hooks; a script is refused", field="script_token_ids")
    if _wanted_from(work, facts) is not None:
        return None
    _check_ids("script_token_ids", work.script_token_ids, facts)
    end_token_id = facts.end_token_ids[0] if work.script_ends_with_eos and facts.end_token_ids else None
    return Script(tuple(work.script_token_ids), end_token_id, work.script_ends_with_eos)


def _wanted_from(work: pb.DecodeWork, facts: WorkerFacts) -> WantedText | None:
    """Only a rule makes a difference: without one, the tokens of the text are known."""
    if not (facts.hooks_on and work.scripted and work.HasField("rule") and work.HasField("script_wants")):
        return None
    return WantedText(work.script_wants, work.script_ends_with_eos)


def _check_tokens(work: pb.DecodeWork, facts: WorkerFacts) -> None:
    num_tokens = len(work.token_ids)
    if not num_tokens:
        raise InvalidPrompt("a decode lease without tokens", field="token_ids")
    if not 1 <= work.num_prompt_tokens <= num_tokens:
        raise BadInput(f"{work.num_prompt_tokens} prompt tokens of {num_tokens}", field="num_prompt_tokens")
    _check_ids("token_ids", work.token_ids, facts)
    if num_tokens > facts.max_context_tokens:
        raise PromptTooLong(
            f"{num_tokens} tokens do not fit this worker's {facts.max_context_tokens}",
            field="token_ids",
            metadata={"num_tokens": str(num_tokens), "max_tokens": str(facts.max_context_tokens)},
        )


def _check_ids(field: str, token_ids: Collection[int], facts: WorkerFacts) -> None:
    if not token_ids:
        return
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < facts.vocab_size:
            raise BadInput(
                f"{field}: token id {token_id} is outside the vocabulary, 0 to {facts.vocab_size - 1}", field=field
            )
