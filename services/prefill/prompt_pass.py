"""The prompt pass: token ids in, KV blocks and the last hidden state out, in chunks on the model thread.

Owns the order of steps and what holds between them: waiting for equal prompts, cancel, deadline, faults, publishing,
spans. Knows neither the router nor readers. Several prompts may be under way; the model thread takes their chunks in
turn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from opentelemetry.trace import Span, Tracer
from torch import Tensor

from meshfire.errors import InternalError
from meshfire.kv.block_pool import BlockPool
from meshfire.kv.hashing import chain_hashes
from meshfire.kv.store import KvStore
from meshfire.kv.transfer import KvManifest
from meshfire.model.interface import CausalLM
from meshfire.model.prompt_scores import score
from meshfire.model.sampling import TokenLogprobs
from meshfire.runtime.model_thread import ModelThread
from meshfire.telemetry import names
from meshfire.telemetry.spans import span, traceparent_of
from meshfire.worker.faults import Fault, HopFault, strike
from meshfire.worker.ports import Experts, ExpertSession
from services.prefill.blocks import SequenceBlocks
from services.prefill.chunks import Chunk, batch_of, chunks_of
from services.prefill.instruments import PrefillInstruments
from services.prefill.prompt import Prefilled, Prompt, Stop
from services.prefill.under_way import Flight, UnderWay


@dataclass(frozen=True)
class PromptPass:
    """Everything that computing a prompt takes."""

    model: CausalLM
    model_revision: str
    store: KvStore
    pool: BlockPool
    under_way: UnderWay
    thread: ModelThread
    experts: Experts
    chunk_tokens: int
    #: for faults that aim at one instance
    instance_id: str
    tracer: Tracer
    instruments: PrefillInstruments

    async def run(self, prompt: Prompt, stop: Stop, lease_span: Span) -> Prefilled:
        """Compute a prompt. Raises what `stop` says, NoFreeBlocks, or what the experts raise; then holds no block.

        Returns only between chunks: a chunk on the model thread still writes to its blocks and is always waited for.
        """
        geometry = self.store.geometry
        hashes = chain_hashes(
            prompt.token_ids,
            geometry.block_tokens,
            model_revision=self.model_revision,
            cache_salt=prompt.cache_salt,
        )
        num_tokens = len(prompt.token_ids)
        # Cached KV does not hold the hidden states that log-probabilities come from.
        reuse = prompt.num_logprobs is None
        blocks = SequenceBlocks(self.pool, hashes, num_tokens, geometry.block_tokens, reuse=reuse)
        await self._join(blocks, stop, lease_span)
        with blocks, self._announce(prompt, blocks) as flight:
            last_hidden, logprobs = await self._compute(prompt, stop, blocks, flight, lease_span)
            manifest = KvManifest(self.model_revision, geometry, num_tokens, tuple(hashes))
            return Prefilled(blocks.keep(), manifest, last_hidden, blocks.num_cached_tokens, tuple(logprobs))

    async def _join(self, blocks: SequenceBlocks, stop: Stop, lease_span: Span) -> None:
        """Wait for the blocks that a prompt with the same beginning is computing."""
        started = time.perf_counter()
        await blocks.wait_for(self.under_way, stop)
        lease_span.set_attribute(names.ATTR_KV_JOIN_WAIT_MS, (time.perf_counter() - started) * 1e3)

    def _announce(self, prompt: Prompt, blocks: SequenceBlocks) -> AbstractContextManager[Flight]:
        """Let others wait for these blocks; but a rehearsed failure holds up nobody else."""
        return self.under_way.announce(blocks.to_compute if prompt.fault is None else ())

    async def _compute(
        self, prompt: Prompt, stop: Stop, blocks: SequenceBlocks, flight: Flight, lease_span: Span
    ) -> tuple[Tensor, list[TokenLogprobs]]:
        traceparents = [traceparent_of(lease_span)]
        session = self.experts.session(
            deadline=prompt.deadline, traceparents=traceparents, fault=_hop_fault(prompt.fault)
        )
        last_hidden: Tensor | None = None
        logprobs: list[TokenLogprobs] = []
        try:
            for chunk in chunks_of(blocks.num_cached_tokens, len(prompt.token_ids), self.chunk_tokens):
                stop.check()
                await self._rehearse(prompt.fault, chunk, stop)
                last_hidden, scored = await self._run_chunk(prompt, chunk, stop, blocks, session, traceparents[0])
                logprobs += scored
                blocks.publish_up_to(chunk.stop)
                flight.step()
            stop.check()
        finally:
            self.experts.finish(traceparents)
            record_shards(lease_span, session)
        if last_hidden is None:
            raise InternalError("a prompt without a token to compute")
        return last_hidden, logprobs

    async def _run_chunk(
        self, prompt: Prompt, chunk: Chunk, stop: Stop, blocks: SequenceBlocks, session: ExpertSession, parent: str
    ) -> tuple[Tensor, list[TokenLogprobs]]:
        attributes = {names.ATTR_CHUNK_START: chunk.start, names.ATTR_CHUNK_TOKENS: chunk.num_tokens}
        with span(self.tracer, names.SPAN_PREFILL_CHUNK, parent=parent, attributes=attributes) as chunk_span:
            last_hidden, scored, seconds = await self.thread.run(
                self._forward, prompt, chunk, blocks.blocks, stop, session
            )
            chunk_span.set_attribute(names.ATTR_COMPUTE_MS, seconds * 1e3)
        self.instruments.chunk_done(chunk.num_tokens, seconds)
        return last_hidden, scored

    def _forward(
        self, prompt: Prompt, chunk: Chunk, blocks: Sequence[int], stop: Stop, session: ExpertSession
    ) -> tuple[Tensor, list[TokenLogprobs], float]:
        """On the model thread: the last row of the chunk's hidden states [H], log-probabilities if the prompt asks, and
        the seconds it took."""
        stop.check()  # it may have waited behind other prompts' chunks
        started = time.perf_counter()
        batch = batch_of(chunk, prompt.token_ids, blocks, self.store.geometry.block_tokens)
        hidden = self.model.forward(batch, self.store, session)
        scored: list[TokenLogprobs] = []
        if prompt.num_logprobs is not None:
            # The prompt's last token is followed by nothing: that place is the output's.
            following = prompt.token_ids[chunk.start + 1 : chunk.stop + 1]
            scored = score(self.model, hidden, following, prompt.num_logprobs)
        return hidden[-1].clone(), scored, time.perf_counter() - started

    async def _rehearse(self, fault: Fault | None, chunk: Chunk, stop: Stop) -> None:
        if fault is None or not fault.aims_at("prefill", self.instance_id):
            return
        # Without a trigger it acts once, before the first chunk.
        if not fault.strikes(chunk=chunk.index) or (fault.trigger is None and chunk.index > 0):
            return
        if fault.action == "delay":
            await stop.sleep(fault.delay_s)
        else:
            await strike(fault)


def record_shards(lease_span: Span, session: ExpertSession) -> None:
    """One event per expert shard that took part: what its hops carried and cost."""
    for shard_id, stats in session.stats.items():
        lease_span.add_event(
            names.EVENT_EXPERT_SHARD,
            {
                names.ATTR_SHARD_ID: shard_id,
                names.ATTR_EXPERT_HOPS: stats.hops,
                names.ATTR_EXPERT_TOKENS: stats.tokens,
                names.ATTR_EXPERT_BYTES_OUT: stats.bytes_out,
                names.ATTR_EXPERT_BYTES_IN: stats.bytes_in,
                names.ATTR_EXPERT_WAIT_MS: stats.wait_ns / 1e6,
                names.ATTR_EXPERT_QUEUE_MS: stats.queue_ns / 1e6,
                names.ATTR_EXPERT_COMPUTE_MS: stats.compute_ns / 1e6,
            },
        )


def _hop_fault(fault: Fault | None) -> HopFault | None:
    """What an expert shard shall rehearse during this prompt; what comes at a token is the decode worker's to tell."""
    if fault is None or fault.role != "expert" or (fault.trigger and fault.trigger.name == "token"):
        return None
    return HopFault(fault)
