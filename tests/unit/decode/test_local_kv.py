"""KV that decode computes is bit for bit a prefill worker's: real models, chunks beside outputs, wrong guesses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshfire.kv.block_pool import BlockPool
from meshfire.kv.hashing import HashChain
from meshfire.kv.store import KvStore
from meshfire.model import registry
from meshfire.model.experts import LocalExperts
from meshfire.model.interface import CausalLM
from meshfire.sched.batch import forward_batch
from meshfire.sched.parts import ChunkBudget, StepPart, next_parts
from meshfire.sched.policy import Scheduler
from meshfire.sched.sequence import Sequence
from services.prefill.chunks import batch_of, chunks_of
from tests import oracles

P = 4
NUM_BLOCKS = 120
PROMPTS = [[random.Random(seed).randrange(256) for _ in range(length)] for seed, length in enumerate((29, 18, 40))]
NUM_OUTPUT = 9


@pytest.fixture(params=[oracles.make_llama_checkpoint, oracles.make_deepseek_checkpoint], ids=["llama", "kimi"])
def parts(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[CausalLM, LocalExperts]:
    directory = request.param(tmp_path / "model")
    return registry.load(directory, block_tokens=P), LocalExperts(registry.open_experts(directory))


def prefilled(model: CausalLM, experts: LocalExperts, token_ids: list[int]) -> Iterator[Tensor]:
    """The full blocks of a sequence as a prefill worker computes them, in one chunk."""
    store, num_blocks = KvStore(model.geometry, NUM_BLOCKS), -(-len(token_ids) // P)
    (chunk,) = chunks_of(0, len(token_ids), len(token_ids))
    model.forward(batch_of(chunk, token_ids, range(num_blocks), P), store, experts)
    return (store.export_block(block) for block in range(len(token_ids) // P))


def guesses(rng: random.Random, part: StepPart) -> tuple[int, ...]:
    """Wrong ones, some of the time."""
    is_output = part.is_last and part.stop - part.start == 1
    return tuple(rng.randrange(256) for _ in range(rng.randrange(3))) if is_output else ()


@torch.no_grad()
@pytest.mark.parametrize("budget", [ChunkBudget(1, 3), ChunkBudget(7, 7), ChunkBudget(100, 100)])
def test_published_blocks_are_those_of_a_prefill_worker(parts: Any, budget: ChunkBudget) -> None:
    model, experts = parts
    rng, store, pool = random.Random(3), KvStore(model.geometry, NUM_BLOCKS), BlockPool(NUM_BLOCKS)
    scheduler = Scheduler(pool, block_tokens=P, max_active=8, max_waiting=8)
    waiting = [Sequence(list(prompt), len(prompt), HashChain(P, model_revision="r")) for prompt in PROMPTS]
    sequences = list(waiting)
    while any(one.num_output_tokens < NUM_OUTPUT for one in sequences):
        if waiting:  # they join one by one, beside the outputs of those before
            scheduler.add(waiting.pop(0))
        for one in scheduler.admit():
            scheduler.compute(one)
        scheduler.grow()
        step = []
        for part in next_parts(scheduler, budget):
            draft_ids = guesses(rng, part)
            room = scheduler.reserve(part.sequence, len(draft_ids))
            step.append(StepPart(part.sequence, part.start, part.stop, draft_ids[:room]))
        batch = forward_batch(step)
        hidden = model.forward(batch, store, experts)
        for part, rows in zip(step, batch.sequences, strict=True):
            if part.is_last:
                logits = model.logits(hidden[rows.stop - 1 - len(part.draft_ids)][None])
                part.sequence.append(int(logits.argmax()))
            scheduler.computed(part.sequence, part.stop)
    for one in sequences:
        blocks = pool.match(one.chain.hashes)
        assert len(blocks) == one.num_computed_tokens // P
        for block, expected in zip(blocks, prefilled(model, experts, one.token_ids), strict=False):
            assert torch.equal(store.export_block(block), expected)
