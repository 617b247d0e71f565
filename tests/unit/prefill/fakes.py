"""Stand-ins for what a prefill worker is given: a model that can be computed by hand, a link, experts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.kv.store import KvStore
from meshfire.model.interface import ExpertBackend, ExpertLayout, ForwardBatch, KvGeometry
from meshfire.worker.hop import HopStats

BLOCK_TOKENS = 4
GEOMETRY = KvGeometry(num_layers=3, block_tokens=BLOCK_TOKENS, row_width=2)
VOCAB_SIZE = 100
CONTEXT_TOKENS = 64


def expected_row(layer: int, token_id: int, position: int) -> list[float]:
    """KV of one token: small integers, so that sums of them are exact."""
    return [float(token_id * (layer + 1)), float(position)]


def expected_hidden(token_ids: Sequence[int]) -> list[float]:
    """Hidden state of the last token: the sum of all rows of all layers of the context."""
    rows = [
        expected_row(layer, token_id, position)
        for layer in range(GEOMETRY.num_layers)
        for position, token_id in enumerate(token_ids)
    ]
    return [sum(row[0] for row in rows), sum(row[1] for row in rows)]


class FakeModel:
    """A decoder whose hidden state depends on every row of its context as the KV store gives it back."""

    geometry = GEOMETRY
    hidden_size = 2
    vocab_size = VOCAB_SIZE
    context_tokens = CONTEXT_TOKENS
    experts = ExpertLayout((0, 0, 0), 2)

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        #: cleared = the next forward waits on the model thread
        self.may_run = threading.Event()
        self.may_run.set()
        self.entered = threading.Event()
        self.error: Exception | None = None

    def forward(self, batch: ForwardBatch, kv: KvStore, experts: ExpertBackend) -> Tensor:
        self.steps.append(batch.token_ids.tolist())
        self.entered.set()
        assert self.may_run.wait(10)
        if self.error is not None:
            raise self.error
        (sequence,) = batch.sequences
        for layer in range(GEOMETRY.num_layers):
            pairs = zip(batch.token_ids.tolist(), batch.positions.tolist())
            kv.write(layer, batch.slots, torch.tensor([expected_row(layer, *pair) for pair in pairs]))
        first = sequence.context_tokens - (sequence.stop - sequence.start)
        return torch.stack([self._hidden(kv, sequence.block_table, first + row + 1) for row in range(len(batch.slots))])

    def _hidden(self, kv: KvStore, table: Tensor, num_tokens: int) -> Tensor:
        return sum(kv.read(layer, table, num_tokens).sum(dim=0) for layer in range(GEOMETRY.num_layers))  # type: ignore[return-value]

    def logits(self, hidden: Tensor) -> Tensor:
        raise AssertionError("a prefill worker computes no logits")


class FakeExperts:
    """Records which sessions were opened and finished."""

    def __init__(self) -> None:
        self.opened: list[list[str]] = []
        self.finished: list[list[str]] = []
        self.stats: Mapping[str, HopStats] = {"shard-0": HopStats(hops=3, tokens=12, bytes_out=96, bytes_in=192)}

    def session(self, *, deadline: float, traceparents: Sequence[str], fault: Any = None) -> FakeExperts:
        self.opened.append(list(traceparents))
        return self

    def finish(self, traceparents: Sequence[str]) -> None:
        self.finished.append(list(traceparents))

    def dispatch(self, *_: object) -> object:
        raise AssertionError("the fake model has no experts")


class FakeLink:
    """Keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, pb.WorkRequest]] = []
        self.credits: list[tuple[int, int]] = []
        self._arrived = asyncio.Event()

    def send(self, router_id: str, message: pb.WorkRequest) -> None:
        self.sent.append((router_id, message))
        self._arrived.set()

    def set_credit(self, num_slots: int, num_free_blocks: int, num_pending_tokens: int = 0) -> None:
        self.credits.append((num_slots, num_free_blocks))

    async def message(self, index: int = 0) -> pb.WorkRequest:
        """The message number `index`, waited for."""
        async with asyncio.timeout(10):
            while len(self.sent) <= index:
                self._arrived.clear()
                await self._arrived.wait()
        return self.sent[index][1]


def lease_of(token_ids: Sequence[int], **changes: object) -> pb.Lease:
    """A prefill lease with 60 s to live."""
    fields: dict[str, object] = {"request_id": "r1", "epoch": 1, "remaining_ms": 60_000}
    return pb.Lease(**{**fields, **changes}, prefill=pb.PrefillWork(token_ids=token_ids))  # type: ignore[arg-type]


async def until(condition: object, seconds: float = 10.0) -> None:
    """Let the loop run until `condition()` holds."""
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.002)
