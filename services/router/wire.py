"""Messages to values and back; no decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from meshfire.api.common.v1 import kv_pb2, sampling_pb2
from meshfire.api.router.v1 import inference_service_pb2 as inference_pb
from meshfire.api.router.v1 import work_service_pb2 as work_pb
from meshfire.api.tokenizer.v1 import tokenizer_service_pb2 as tokenizer_pb
from meshfire.errors import BadInput
from meshfire.rpc.status import from_reason
from services.router import lifecycle_events as ev
from services.router.lifecycle_events import Stage
from services.router.models import ModelFacts
from services.router.output import FinishReason, Logprobs, OutputToken
from services.router.tickets import Priority
from services.router.workers import Geometry, WorkerFacts

_STAGES = {work_pb.WORKER_ROLE_PREFILL: Stage.PREFILL, work_pb.WORKER_ROLE_DECODE: Stage.DECODE}
_REASONS = {
    sampling_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    sampling_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
_REASONS_OUT = {reason: value for value, reason in _REASONS.items()} | {
    FinishReason.TOOL_CALLS: sampling_pb2.FINISH_REASON_TOOL_CALLS
}


def worker_from(hello: work_pb.WorkerHello) -> WorkerFacts:
    """Who a worker is. BadInput names what is missing or senseless."""
    stage = _STAGES.get(hello.role)
    if stage is None:
        raise BadInput(f"role {hello.role} is not known", field="hello.role")
    for name in ("worker_id", "model", "model_revision", "address"):
        if not getattr(hello, name):
            raise BadInput(f"{name} is empty", field=f"hello.{name}")
    for name in ("context_tokens", "vocab_size"):
        if getattr(hello, name) < 1:
            raise BadInput(f"{name} is {getattr(hello, name)}, expected at least 1", field=f"hello.{name}")
    return WorkerFacts(
        worker_id=hello.worker_id,
        stage=stage,
        model=hello.model,
        revision=hello.model_revision,
        geometry=_geometry_from(hello.geometry),
        address=hello.address,
        context_tokens=hello.context_tokens,
        vocab_size=hello.vocab_size,
        end_token_ids=frozenset(hello.end_token_ids),
    )


def _geometry_from(message: kv_pb2.KvGeometry) -> Geometry:
    for name in ("num_layers", "block_tokens", "row_width"):
        if getattr(message, name) < 1:
            field = f"hello.geometry.{name}"
            raise BadInput(f"{field} is {getattr(message, name)}, expected at least 1", field=field)
    return Geometry(message.num_layers, message.block_tokens, message.row_width, message.dtype)


def progress_from(worker_id: str, message: work_pb.TokenProgress) -> ev.Progressed:
    """New tokens of one request."""
    if message.logprobs and len(message.logprobs) != len(message.token_ids):
        counts = f"{len(message.logprobs)} logprobs for {len(message.token_ids)} tokens"
        raise BadInput(counts, field="progress.tokens.logprobs")
    logprobs: Sequence[Logprobs | None] = _logprobs_from(message.logprobs) or [None] * len(message.token_ids)
    tokens = tuple(map(OutputToken, message.token_ids, logprobs))
    return ev.Progressed(worker_id, message.epoch, message.first_index, tokens)


def _logprobs_from(messages: Iterable[sampling_pb2.TokenLogprobs]) -> list[Logprobs]:
    return [Logprobs(one.logprob, tuple(one.top_ids), tuple(one.top_logprobs)) for one in messages]


def scored_from(worker_id: str, message: work_pb.PromptLogprobs) -> ev.PromptScored:
    """Log-probabilities of a prompt."""
    if message.first_index < 1:
        raise BadInput(
            f"first_index is {message.first_index}, expected at least 1", field="prompt_logprobs.first_index"
        )
    return ev.PromptScored(worker_id, message.epoch, message.first_index, tuple(_logprobs_from(message.logprobs)))


def prompt_computed_from(worker_id: str, message: work_pb.PromptComputed) -> ev.PromptComputed:
    """A prompt that decode computed itself."""
    return ev.PromptComputed(worker_id, message.epoch, message.num_cached_tokens)


def offer_from(worker_id: str, message: work_pb.KvOffer) -> ev.Offered:
    """KV that is ready."""
    offer = ev.Offer(
        kv_lease_id=message.kv_lease_id,
        num_tokens=message.num_tokens,
        num_cached_tokens=message.num_cached_tokens,
        num_bytes=message.num_bytes,
        expires_ms=message.expires_ms,
    )
    return ev.Offered(worker_id, message.epoch, offer)


def completion_from(worker_id: str, message: work_pb.LeaseFinished) -> ev.Completed:
    """An output that is complete."""
    reason = _REASONS.get(message.finish_reason)
    if reason is None:
        raise BadInput(f"finish_reason {message.finish_reason} is not known", field="finished.finish_reason")
    stop_token_id = message.stop_token_id if message.HasField("stop_token_id") else None
    return ev.Completed(worker_id, message.epoch, reason, stop_token_id, message.kv_bytes)


def failure_from(worker_id: str, message: work_pb.LeaseFailed) -> ev.LeaseFailed:
    """A lease that was given up."""
    error = from_reason(message.reason, message.message, dict(message.metadata), retryable=message.retryable)
    return ev.LeaseFailed(worker_id, message.epoch, error, message.retryable)


def priority_from(value: int) -> Priority:
    """Unspecified is online."""
    return Priority.ASYNCHRONOUS if value == inference_pb.PRIORITY_ASYNCHRONOUS else Priority.ONLINE


def tokenize_request_from(
    request: inference_pb.GenerateRequest | inference_pb.CountTokensRequest,
) -> tokenizer_pb.TokenizeRequest:
    """A prompt and the rule of its output as the tokenizer wants them; token ids need no encoding."""
    wanted = tokenizer_pb.TokenizeRequest(model=request.model)
    kind = request.WhichOneof("prompt")
    if kind == "chat":
        wanted.chat.CopyFrom(request.chat)
    elif kind == "text":
        wanted.text = request.text
    if isinstance(request, inference_pb.GenerateRequest) and request.HasField("rule"):
        wanted.rule.CopyFrom(request.rule)
    return wanted


def delta_to(
    text: str,
    tokens: Sequence[OutputToken],
    pieces: Mapping[int, bytes] | None,
    events: Sequence[tokenizer_pb.OutputEvent] = (),
) -> inference_pb.GenerateResponse:
    """New tokens for the client; `pieces` are the bytes of every id that has a log-probability."""
    text += "".join(event.content for event in events)
    delta = inference_pb.GenerateDelta(text=text, token_ids=[token.token_id for token in tokens], events=events)
    for token in tokens:
        if token.logprobs is not None and pieces is not None:
            delta.logprobs.append(logprobs_to(token.token_id, token.logprobs, pieces))
    return inference_pb.GenerateResponse(delta=delta)


def logprobs_to(token_id: int, logprobs: Logprobs, pieces: Mapping[int, bytes]) -> sampling_pb2.TokenLogprobs:
    """Of one token; `pieces` are the bytes of it and of the likeliest ones."""
    return sampling_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top_ids=logprobs.top_ids,
        top_logprobs=logprobs.top_logprobs,
        piece=pieces[token_id],
        top_pieces=[pieces[top_id] for top_id in logprobs.top_ids],
    )


def reason_to(reason: FinishReason) -> sampling_pb2.FinishReason.ValueType:
    """Why an output ended."""
    return _REASONS_OUT[reason]


def model_to(facts: ModelFacts) -> inference_pb.Model:
    """A served model."""
    return inference_pb.Model(
        name=facts.name,
        revision=facts.revision,
        context_tokens=facts.context_tokens,
        vocab_size=facts.vocab_size,
    )
