"""From a request to work that can be leased: everything that is refused is refused here.

Owns the order of the checks: form, model, room in the queue, encoding, fit. Leases nothing.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field, replace

from opentelemetry.trace import Span, SpanKind, Tracer

from meshfire.api.common.v1 import sampling_pb2
from meshfire.api.router.v1 import inference_service_pb2 as pb
from meshfire.errors import BadInput
from meshfire.kv.hashing import chain_hashes
from meshfire.telemetry import names, spans
from services.router import wire
from services.router.billing import Payer
from services.router.desk import Desk
from services.router.hooks import SCRIPT_HEADER, Hooks
from services.router.models import ModelFacts, wait_for_model
from services.router.outlook import Newcomer
from services.router.tokenizers import Encoded, Tokenizers
from services.router.validation import check_fit, check_form
from services.router.work import Script, Work

#: about a millisecond's worth
_LOOP_HASH_TOKENS = 16_384


@dataclass(frozen=True)
class Call:
    """What came with one call of Generate."""

    request: pb.GenerateRequest
    hooks: Hooks
    #: of the event loop's clock
    deadline_s: float
    #: W3C traceparent of the caller; "" = none
    traceparent: str
    payer: Payer = field(default_factory=Payer)


@dataclass(frozen=True)
class Admission:
    """The door. `worker_wait_s`: wait for workers of a model that was there before."""

    desk: Desk
    tokenizers: Tokenizers
    tracer: Tracer
    worker_wait_s: float

    async def admit(self, request_id: str, call: Call, span: Span) -> Work:
        """The work of a call. Raises BadInput, UnknownModel, NoWorker, QueueFull, OutOfCapacity."""
        request = call.request
        check_form(request)
        priority = wire.priority_from(request.priority)
        facts = await wait_for_model(self.desk.workers, request.model, self.worker_wait_s)
        newcomer = Newcomer(
            request.model, priority, call.payer.account_id, 0, call.deadline_s, never_waits=request.reject_if_busy
        )
        # Twice: a full queue should not cost the tokenizer anything, and only tokens tell how much waits.
        self.desk.admit(newcomer)
        encoded = await self._prompt(request, span)
        prompt = encoded.token_ids
        check_fit(request, facts, prompt)
        script = await self._script(call, span)
        block_hashes = await _block_hashes(prompt, request.cache_salt, facts)
        outlook = self.desk.admit(replace(newcomer, num_tokens=len(prompt)))
        sampling = resolve_sampling(request.sampling, num_tokens_left=facts.context_tokens - len(prompt))
        if encoded.rule is not None and sampling.ignore_eos and not request.HasField("rule"):
            encoded = replace(encoded, rule=None)  # an output that never ends cannot be held to a call's grammar
        return Work(
            request_id=request_id,
            model=request.model,
            prompt=prompt,
            sampling=sampling,
            end_ids=end_ids_of(sampling, facts),
            deadline_s=call.deadline_s,
            priority=priority,
            arrival=self.desk.next_arrival(),
            tenant=call.payer.account_id,
            admitted_s=self.desk.now_s,
            outlook=outlook,
            session_key=request.session_key,
            block_hashes=block_hashes,
            cache_salt=request.cache_salt,
            traceparent=spans.traceparent_of(span),
            output=None if request.keep_special_tokens else encoded.output,
            rule=encoded.rule,
            fault=call.hooks.fault,
            script=script,
        )

    async def _prompt(self, request: pb.GenerateRequest, span: Span) -> Encoded:
        given = tuple(request.token_ids.ids)
        if given and not request.HasField("rule"):
            return Encoded(given)
        parent = spans.traceparent_of(span)
        with spans.span(self.tracer, names.SPAN_ROUTER_TOKENIZE, parent=parent, kind=SpanKind.CLIENT) as child:
            wanted = wire.tokenize_request_from(request)
            encoded = await self.tokenizers.tokenize(wanted, spans.traceparent_of(child))
            encoded = replace(encoded, token_ids=given) if given else encoded
            child.set_attribute(names.ATTR_TOKENS_PROMPT, len(encoded.token_ids))
            return encoded

    async def _script(self, call: Call, span: Span) -> Script | None:
        if call.hooks.script_json is None:
            return None
        parent = spans.traceparent_of(span)
        try:
            return await self.tokenizers.script(call.request.model, call.hooks.script_json, parent)
        except BadInput as error:
            raise BadInput(f"{SCRIPT_HEADER}: {error.message}", field=SCRIPT_HEADER) from None


async def _block_hashes(prompt: tuple[int, ...], cache_salt: str, facts: ModelFacts) -> tuple[bytes, ...]:
    """Of full blocks. Long prompts are hashed off the event loop."""

    def compute() -> tuple[bytes, ...]:
        full = prompt[: len(prompt) // facts.block_tokens * facts.block_tokens]
        hashes = chain_hashes(full, facts.block_tokens, model_revision=facts.revision, cache_salt=cache_salt)
        return tuple(hashes)

    return compute() if len(prompt) <= _LOOP_HASH_TOKENS else await asyncio.to_thread(compute)


def resolve_sampling(asked: sampling_pb2.SamplingParams, *, num_tokens_left: int) -> sampling_pb2.SamplingParams:
    """What a decode worker is told: max_tokens within the context window, and a seed, drawn if none was asked for.

    Everything else that is not set stays so: the model's own defaults are the decode worker's to know.
    """
    sampling = sampling_pb2.SamplingParams()
    sampling.CopyFrom(asked)
    wanted = asked.max_tokens if asked.HasField("max_tokens") else num_tokens_left
    sampling.max_tokens = min(wanted, num_tokens_left)
    if not asked.HasField("seed"):
        # 53 bits: the client may be a language whose numbers are doubles, and wants to send it back.
        sampling.seed = secrets.randbits(53)
    return sampling


def end_ids_of(sampling: sampling_pb2.SamplingParams, facts: ModelFacts) -> frozenset[int]:
    """Token ids that end the output."""
    own: frozenset[int] = frozenset() if sampling.ignore_eos else facts.end_token_ids
    return own | frozenset(sampling.stop_token_ids)
