"""A model on several ranks, in real processes over gloo: the same bits as on one, and an end when a rank is gone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshfire.errors import CheckpointError, RankLost, ShardUnavailable, Unavailable
from meshfire.kv.store import KvStore
from meshfire.model import registry
from meshfire.model.experts import LocalExperts
from meshfire.model.interface import CausalLM, ExpertBackend, ForwardBatch, KvGeometry, PendingExperts, SequenceSlice
from meshfire.model.partition import Partition
from meshfire.parallel.ranks import ModelOptions, RankedModel, open_ranks
from meshfire.runtime.model_thread import ModelThread
from tests.oracles import make_deepseek_checkpoint, make_llama_checkpoint

P = 4
BLOCKS = 24


def batch_of(parts: Sequence[tuple[int, int, Sequence[int]]]) -> ForwardBatch:
    """Parts are (sequence, first position, token ids); sequence i owns every third block from i on."""
    ids, positions, slots, slices = [], [], [], []
    for sequence, first, tokens in parts:
        table = torch.arange(sequence, BLOCKS, 3)
        where = torch.arange(first, first + len(tokens))
        context = first + len(tokens)
        slices.append(SequenceSlice(len(ids), len(ids) + len(tokens), context, table[: -(-context // P)]))
        ids += tokens
        positions.append(where)
        slots.append(table[where // P] * P + where % P)
    return ForwardBatch(torch.tensor(ids), torch.cat(positions), torch.cat(slots), slices)


#: two prompts, one of them in two chunks, then a step of both
STEPS = (
    batch_of([(0, 0, [5, 9, 77, 12, 300, 4, 18]), (1, 0, [8, 8, 9])]),
    batch_of([(1, 3, [41, 42, 43, 44, 45, 46])]),
    batch_of([(0, 7, [66]), (1, 9, [99])]),
)


def run(model: CausalLM, store: KvStore, experts: ExpertBackend) -> list[Tensor]:
    """Logits of every step."""
    return [model.logits(model.forward(step, store, experts)) for step in STEPS]


@asynccontextmanager
async def ranks(
    directory: Path, size: int, compute: str = "fp32", **options: int
) -> AsyncIterator[tuple[RankedModel, ModelThread]]:
    alone = registry.load(directory, block_tokens=P)
    with ModelThread("ranks") as thread:
        async with open_ranks(
            ModelOptions(directory, options.get("dense_slices", 0), P, compute),
            alone.geometry,
            BLOCKS,
            thread,
            size=size,
            timeout_s=10.0,
        ) as ranked:
            yield ranked, thread


@pytest.mark.parametrize(
    ("architecture", "size", "compute"),
    [
        ("llama", 2, "fp32"),
        ("llama", 4, "fp32"),
        ("deepseek", 2, "fp32"),
        ("deepseek", 4, "fp32"),
        ("llama", 4, "int8"),
        ("deepseek", 2, "int8"),
        ("llama", 2, "bf16"),
    ],
)
async def test_every_rank_count_gives_the_bits_of_one(
    architecture: str, size: int, compute: str, tmp_path: Path
) -> None:
    if architecture == "llama":
        directory = make_llama_checkpoint(tmp_path, num_key_value_heads=4, num_attention_heads=8)
    else:
        directory = make_deepseek_checkpoint(tmp_path)
    alone = registry.load(directory, block_tokens=P, compute=compute)
    experts = LocalExperts(registry.open_experts(directory, compute=compute))
    store = KvStore(alone.geometry, BLOCKS)
    expected = run(alone, store, experts)
    async with ranks(directory, size, compute) as (ranked, thread):
        seen = await thread.run(run, ranked.model, ranked.store, experts)
        assert ranked.model.geometry == alone.geometry
        for mine, theirs in zip(seen, expected, strict=True):
            assert torch.equal(mine, theirs)
        # The cache holds whole rows: any other worker, of whatever rank count, may read it.
        assert torch.equal(ranked.store.blocks, store.blocks)
        assert expected[-1].abs().max() > 0.1


class FailingOnce:
    """An expert backend whose first dispatch of a layer fails, at the dispatch or at its result."""

    def __init__(self, backend: ExpertBackend, *, late: bool) -> None:
        self._backend, self._late, self.failures = backend, late, 0

    def dispatch(self, layer: int, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> PendingExperts:
        if self.failures:
            return self._backend.dispatch(layer, hidden, topk_ids, topk_weights)
        self.failures += 1
        if not self._late:
            raise ShardUnavailable("shard gone")
        return Failed()


class Failed:
    def result(self) -> Tensor:
        raise ShardUnavailable("shard gone")


@pytest.mark.parametrize("late", [False, True])
async def test_a_step_that_the_experts_fail_is_given_up_by_every_rank_and_can_be_repeated(
    late: bool, tmp_path: Path
) -> None:
    directory = make_deepseek_checkpoint(tmp_path)
    experts = LocalExperts(registry.open_experts(directory))
    alone = registry.load(directory, block_tokens=P)
    expected = run(alone, KvStore(alone.geometry, BLOCKS), experts)
    async with ranks(directory, 2) as (ranked, thread):
        failing = FailingOnce(experts, late=late)
        with pytest.raises(ShardUnavailable):
            await thread.run(ranked.model.forward, STEPS[0], ranked.store, failing)
        seen = await thread.run(run, ranked.model, ranked.store, failing)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(seen, expected, strict=True))


async def test_a_killed_rank_ends_the_worker_and_never_hangs_it(tmp_path: Path) -> None:
    directory = make_llama_checkpoint(tmp_path)
    experts = LocalExperts(registry.open_experts(directory))
    async with ranks(directory, 2) as (ranked, thread):
        watch = asyncio.create_task(ranked.watch())
        await asyncio.sleep(0)
        os.kill(ranked.pids[0], signal.SIGKILL)
        with pytest.raises(RankLost):
            await watch
        for _ in range(2):  # and it stays lost
            with pytest.raises(RankLost) as caught:
                await thread.run(ranked.model.forward, STEPS[0], ranked.store, experts)
            assert isinstance(caught.value, Unavailable)


async def test_a_frozen_rank_is_lost_after_the_timeout(tmp_path: Path) -> None:
    directory = make_llama_checkpoint(tmp_path)
    experts = LocalExperts(registry.open_experts(directory))
    alone = registry.load(directory, block_tokens=P)
    with ModelThread("ranks") as thread:
        options = ModelOptions(directory, 0, P, "fp32")
        async with open_ranks(options, alone.geometry, BLOCKS, thread, size=2, timeout_s=3.0) as ranked:
            os.kill(ranked.pids[0], signal.SIGSTOP)
            with pytest.raises(RankLost):
                await thread.run(ranked.model.forward, STEPS[0], ranked.store, experts)


async def test_a_rank_that_cannot_load_is_an_error_at_the_start(tmp_path: Path) -> None:
    directory = make_llama_checkpoint(tmp_path)
    geometry = KvGeometry(3, P, 64)
    with ModelThread("ranks") as thread:
        options = ModelOptions(directory, 0, P, "fp32")
        with pytest.raises((RankLost, CheckpointError)):
            async with open_ranks(options, geometry, BLOCKS, thread, size=3, timeout_s=5.0):
                pass


def test_heads_that_do_not_divide_are_refused_by_name(tmp_path: Path) -> None:
    directory = make_llama_checkpoint(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        registry.load(directory, partition=Partition(0, 3))
    assert caught.value.field == "num_key_value_heads"
