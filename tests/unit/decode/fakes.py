"""Stand-ins for what a decode worker is given: a model that can be computed by hand, a KV reader, a link, experts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.kv.store import KvStore
from meshfire.kv.transfer import KvManifest
from meshfire.model.interface import ExpertBackend, ExpertLayout, ForwardBatch, KvGeometry, KvView
from meshfire.worker.hop import HopStats
from services.decode.kv_reader import KvRead, KvSource

P = 4
GEOMETRY = KvGeometry(num_layers=2, block_tokens=P, row_width=2)
VOCAB_SIZE = 40
END_ID = VOCAB_SIZE - 1
CONTEXT_TOKENS = 64


def next_token(token_ids: Sequence[int]) -> int:
    """What FakeModel continues with: depends on every token and its place; never the end token."""
    score = sum((position + 3) * token_id for position, token_id in enumerate(token_ids)) + 5 * len(token_ids)
    return score % (VOCAB_SIZE - 1)


def continuation(token_ids: Sequence[int], count: int) -> list[int]:
    """The oracle: one sequence alone, without cache, batch or blocks."""
    tokens = list(token_ids)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(token_ids) :]


def kv_row(layer: int, token_id: int, position: int) -> list[float]:
    return [float((layer + 1) * token_id), float(position)]


class FakeModel:
    """Its hidden states hold the next token, computed from the context as the KV store gives it back."""

    geometry = GEOMETRY
    hidden_size = 2
    vocab_size = VOCAB_SIZE
    context_tokens = CONTEXT_TOKENS
    experts = ExpertLayout((1, 0), 2)

    def __init__(self) -> None:
        #: context lengths of every step
        self.steps: list[list[int]] = []
        #: new tokens of each sequence of every step
        self.chunks: list[list[int]] = []
        #: cleared = the next forward waits on the model thread
        self.may_run = threading.Event()
        self.may_run.set()
        self.entered = threading.Event()
        #: raises for a batch that must fail
        self.check: Callable[[list[list[int]]], None] = lambda contexts: None

    def forward(self, batch: ForwardBatch, kv: KvView, experts: ExpertBackend) -> Tensor:
        self.entered.set()
        assert self.may_run.wait(30)
        for layer in range(GEOMETRY.num_layers):
            rows = [kv_row(layer, *one) for one in zip(batch.token_ids.tolist(), batch.positions.tolist())]
            kv.write(layer, batch.slots, torch.tensor(rows))
        contexts = [self._context(kv, one.block_table, one.context_tokens) for one in batch.sequences]
        prefixes = [
            context[: stop + 1]
            for context, part in zip(contexts, batch.sequences)
            for stop in range(part.context_tokens - (part.stop - part.start), part.context_tokens)
        ]
        hidden = torch.tensor([[float(next_token(one)), 0.0] for one in prefixes])
        self.check(contexts)
        ids = torch.zeros(len(hidden), 1, dtype=torch.int32)
        experts.dispatch(0, hidden, ids, torch.ones(len(hidden), 1)).result()
        self.steps.append([len(one) for one in contexts])
        self.chunks.append([part.stop - part.start for part in batch.sequences])
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return -((torch.arange(VOCAB_SIZE)[None, :] - hidden[:, :1]) ** 2)

    def _context(self, kv: KvView, block_table: Tensor, num_tokens: int) -> list[int]:
        layers = [kv.read(layer, block_table, num_tokens) for layer in range(GEOMETRY.num_layers)]
        tokens = [int(token) for token in layers[0][:, 0].tolist()]
        for layer, rows in enumerate(layers):
            expected = [kv_row(layer, token, position) for position, token in enumerate(tokens)]
            assert rows.tolist() == expected, "KV rows of another sequence or position"
        return tokens


class FakeReader:
    """Reads the KV that FakeModel would have written for `tokens[kv_lease_id]`."""

    def __init__(self, store: KvStore) -> None:
        self._store = store
        self.tokens: dict[str, list[int]] = {}
        #: raised instead of reading
        self.errors: dict[str, Exception] = {}
        #: the read waits for it
        self.gates: dict[str, asyncio.Event] = {}
        self.num_held: dict[str, int] = {}
        self.released: list[tuple[str, bool]] = []

    async def read(
        self, source: KvSource, wanted: KvManifest, block_table: Sequence[int], num_held_blocks: int
    ) -> KvRead:
        name = source.kv_lease_id
        self.num_held[name] = num_held_blocks
        if name in self.gates:
            await self.gates[name].wait()
        if name in self.errors:
            raise self.errors[name]
        tokens = self.tokens[name]
        for index in range(num_held_blocks, len(block_table)):
            self._store.import_layers(block_table[index], 0, _block(tokens, index))
        num_bytes = (len(block_table) - num_held_blocks) * GEOMETRY.block_bytes
        return KvRead(torch.tensor([float(next_token(tokens)), 0.0]), num_bytes)

    async def release(self, source: KvSource, *, acknowledged: bool) -> None:
        self.released.append((source.kv_lease_id, acknowledged))


def _block(tokens: Sequence[int], index: int) -> Tensor:
    rows = torch.full((GEOMETRY.num_layers, P, GEOMETRY.row_width), -1.0)
    for offset, token_id in enumerate(tokens[index * P : (index + 1) * P]):
        for layer in range(GEOMETRY.num_layers):
            rows[layer, offset] = torch.tensor(kv_row(layer, token_id, index * P + offset))
    return rows


class FakeExperts:
    """Counts hops; raises the errors of `failures`, one a dispatch."""

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.always: Exception | None = None
        self.finished: list[str] = []
        self.deadlines: list[float] = []
        self.traceparents: list[list[str]] = []

    def session(self, *, deadline: float, traceparents: Sequence[str], fault: Any = None) -> FakeSession:
        self.deadlines.append(deadline)
        self.traceparents.append(list(traceparents))
        return FakeSession(self)

    def finish(self, traceparents: Sequence[str]) -> None:
        self.finished += traceparents


class FakeSession:
    def __init__(self, experts: FakeExperts) -> None:
        self._experts = experts
        self.stats: Mapping[str, HopStats] = {}

    def dispatch(self, layer: int, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> FakeSession:
        self._hidden = hidden
        return self

    def result(self) -> Tensor:
        if self._experts.always is not None:
            raise self._experts.always
        if self._experts.failures:
            raise self._experts.failures.pop(0)
        self.stats = {"shard-0": HopStats(hops=1, tokens=len(self._hidden), bytes_out=8, bytes_in=16, wait_ns=2000)}
        return self._hidden


class FakeLink:
    """Keeps what was sent, checks that outputs have no hole and no double, and lets tests wait."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, pb.WorkRequest]] = []
        self.credit = (0, 0)
        self._news = asyncio.Event()

    def send(self, router_id: str, message: pb.WorkRequest) -> None:
        self.sent.append((router_id, message))
        self._news.set()

    def set_credit(self, num_slots: int, num_free_blocks: int, num_pending_tokens: int = 0) -> None:
        self.credit = (num_slots, num_free_blocks)
        self._news.set()

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until something that was sent makes it true."""
        async with asyncio.timeout(20):
            while not true():
                self._news.clear()
                await self._news.wait()

    def progress(self, request_id: str, epoch: int = 1) -> list[pb.TokenProgress]:
        return [
            one
            for _, message in self.sent
            for one in message.progress.tokens
            if (one.request_id, one.epoch) == (request_id, epoch)
        ]

    def tokens(self, request_id: str, epoch: int = 1) -> list[int]:
        found = self.progress(request_id, epoch)
        first = found[0].first_index if found else 0
        assert [one.first_index for one in found] == list(range(first, first + len(found)))
        return [token_id for one in found for token_id in one.token_ids]

    def ends(self, request_id: str, epoch: int = 1) -> list[pb.LeaseFinished | pb.LeaseFailed]:
        found: list[pb.LeaseFinished | pb.LeaseFailed] = []
        for _, message in self.sent:
            kind = message.WhichOneof("message")
            if kind in ("finished", "failed"):
                end = message.finished if kind == "finished" else message.failed
                if (end.request_id, end.epoch) == (request_id, epoch):
                    found.append(end)
        return found

    async def finished(self, request_id: str, epoch: int = 1) -> pb.LeaseFinished:
        await self.until(lambda: bool(self.ends(request_id, epoch)))
        (end,) = self.ends(request_id, epoch)
        assert isinstance(end, pb.LeaseFinished), end
        return end

    async def failed(self, request_id: str, epoch: int = 1) -> pb.LeaseFailed:
        await self.until(lambda: bool(self.ends(request_id, epoch)))
        (end,) = self.ends(request_id, epoch)
        assert isinstance(end, pb.LeaseFailed), end
        return end
