"""What a generation tells, as values. Knows the messages that they are read from, and no transport."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from meshfire.api.common.v1 import sampling_pb2
from meshfire.api.router.v1 import inference_service_pb2 as pb
from meshfire.api.tokenizer.v1 import tokenizer_service_pb2 as tokenizer_pb

_REASONS = {
    sampling_pb2.FINISH_REASON_STOP: "stop",
    sampling_pb2.FINISH_REASON_LENGTH: "length",
    sampling_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


@dataclass(frozen=True)
class Started:
    """The request was admitted and encoded; first event."""

    request_id: str
    #: 32 hex digits; "" without tracing
    trace_id: str
    num_prompt_tokens: int
    #: filled if `return_prompt_token_ids` was asked for
    prompt_token_ids: tuple[int, ...]
    #: in use; send it again for the same output
    seed: int


@dataclass(frozen=True)
class Logprobs:
    """One token of output or prompt: its bytes, and the likeliest tokens at its place, best first."""

    logprob: float
    piece: bytes
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    top_pieces: tuple[bytes, ...]


@dataclass(frozen=True)
class PromptPart:
    """A part of the prompt, if it was asked for; a long one comes in several. All of `text` is in the first."""

    text: str
    #: filled if `Sampling.num_prompt_logprobs` is set
    token_ids: tuple[int, ...]
    #: one per token id, except for the prompt's first token, before which there is nothing
    logprobs: tuple[Logprobs, ...]


@dataclass(frozen=True)
class CallDelta:
    """A part of a tool call. The first one of an `index` has `id` and `name`, the others only `arguments`."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True)
class Delta:
    """New tokens. `text` may lag behind `token_ids`: characters and stop texts are completed first.

    Of a model with a chat language, `text` is content; what it thought and what it calls come apart.
    """

    text: str
    token_ids: tuple[int, ...]
    #: one per token id if `Sampling.num_logprobs` is set, else empty
    logprobs: tuple[Logprobs, ...]
    reasoning: str = ""
    tool_calls: tuple[CallDelta, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Tokens of a request. `num_output_tokens` counts the end token, which has no text."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    #: of the output tokens
    num_reasoning_tokens: int = 0
    #: what it costs, in millionths of a neuron
    micro_neurons: int = 0


@dataclass(frozen=True)
class Receipt:
    """Who did the work, and why they."""

    prefill_worker_id: str
    decode_worker_id: str
    num_failovers: int
    queue_ms: int
    kv_bytes: int
    #: why the prefill worker: session, cache, load, only
    placement: str = ""
    #: of the prompt, at that worker; `Usage.num_cached_tokens` were found
    num_cached_expected: int = 0
    predicted_queue_ms: int = 0


@dataclass(frozen=True)
class Finished:
    """The output ended; last event."""

    #: "stop", "length" or "tool_calls"
    finish_reason: str
    #: the stop text that was found
    stop_hit: str | None
    #: the end token that was chosen
    stop_token_id: int | None
    usage: Usage
    receipt: Receipt


Event: TypeAlias = Started | PromptPart | Delta | Finished


@dataclass(frozen=True)
class Model:
    """A model that is served now."""

    name: str
    revision: str
    #: tokens of prompt and output at most
    context_tokens: int
    vocab_size: int


def event_from(message: pb.GenerateResponse) -> Event | None:
    """The event in a message; None for one that a newer router may send and this client does not know."""
    kind = message.WhichOneof("event")
    if kind == "delta":
        return _delta_from(message.delta)
    if kind == "started":
        return _started_from(message.started)
    if kind == "prompt":
        return PromptPart(message.prompt.text, tuple(message.prompt.token_ids), _logprobs_from(message.prompt.logprobs))
    if kind == "finished":
        return _finished_from(message.finished)
    return None


def model_from(message: pb.Model) -> Model:
    """A served model."""
    return Model(message.name, message.revision, message.context_tokens, message.vocab_size)


def _started_from(message: pb.GenerateStarted) -> Started:
    return Started(
        request_id=message.request_id,
        trace_id=message.trace_id,
        num_prompt_tokens=message.num_prompt_tokens,
        prompt_token_ids=tuple(message.prompt_token_ids),
        seed=message.seed,
    )


def _delta_from(message: pb.GenerateDelta) -> Delta:
    return Delta(
        message.text,
        tuple(message.token_ids),
        _logprobs_from(message.logprobs),
        reasoning="".join(event.reasoning for event in message.events),
        tool_calls=tuple(call for event in message.events if (call := _call_from(event)) is not None),
    )


def _call_from(event: tokenizer_pb.OutputEvent) -> CallDelta | None:
    match event.WhichOneof("event"):
        case "call_begin":
            return CallDelta(event.call_begin.index, event.call_begin.id, event.call_begin.name)
        case "call_arguments":
            return CallDelta(event.call_arguments.index, arguments=event.call_arguments.text)
        case _:
            return None


def _logprobs_from(messages: Iterable[sampling_pb2.TokenLogprobs]) -> tuple[Logprobs, ...]:
    return tuple(
        Logprobs(one.logprob, one.piece, tuple(one.top_ids), tuple(one.top_logprobs), tuple(one.top_pieces))
        for one in messages
    )


def _finished_from(message: pb.GenerateFinished) -> Finished:
    usage, receipt = message.usage, message.receipt
    return Finished(
        finish_reason=_REASONS.get(message.finish_reason, "unknown"),
        stop_hit=message.stop_hit if message.HasField("stop_hit") else None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        usage=Usage(
            usage.num_prompt_tokens,
            usage.num_cached_tokens,
            usage.num_output_tokens,
            usage.num_reasoning_tokens,
            usage.micro_neurons,
        ),
        receipt=Receipt(
            receipt.prefill_worker_id,
            receipt.decode_worker_id,
            receipt.num_failovers,
            receipt.queue_ms,
            receipt.kv_bytes,
            receipt.placement,
            receipt.num_cached_expected,
            receipt.predicted_queue_ms,
        ),
    )
