"""Bills on their way to the ledger: what counts, and that no line is lost or written twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from meshfire.api.router.v1 import inference_service_pb2 as pb
from meshfire.errors import StoreUnavailable
from meshfire.metering.neurons import Rate, Tokens
from meshfire.metering.prices import PriceTable
from meshfire.store.database import Database
from meshfire.store.ledger import Ledger, Line
from services.router import books
from services.router.billing import Payer, bill_for, is_billed, payer_in
from services.router.books import LedgerBooks

PRICES = PriceTable({"m": Rate(input=1000, output=30, cached=100)})
USAGE = pb.Usage(num_prompt_tokens=50, num_cached_tokens=20, num_output_tokens=7, num_reasoning_tokens=4)


def test_a_bill_counts_the_cached_prompt_at_its_own_rate_and_reasoning_as_output() -> None:
    bill = bill_for(USAGE, Payer(), "m", PRICES)
    assert bill.micro_neurons == 30 * 1000 + 20 * 100 + 7 * 30
    assert (bill.tokens, bill.reasoning_tokens) == (Tokens(50, 20, 7), 4)


def test_a_shared_prompt_is_billed_once() -> None:
    bill = bill_for(USAGE, Payer(pays_for_prompt=False), "m", PRICES)
    assert (bill.tokens, bill.micro_neurons) == (Tokens(0, 0, 7), 7 * 30)


def test_a_model_without_a_price_is_free() -> None:
    assert bill_for(USAGE, Payer(), "other", PRICES).micro_neurons == 0


def test_who_pays() -> None:
    assert payer_in([]) == Payer("", "", True)
    told = [("x-meshfire-account", "a"), ("x-meshfire-key", "k"), ("x-meshfire-shared-prompt", "1"), ("x", b"\x00")]
    assert payer_in(told) == Payer("a", "k", False)


@pytest.mark.parametrize(
    ("outcome", "billed"),
    [
        ("stop", True),
        ("length", True),
        ("tool_calls", True),
        ("CANCELLED", True),
        ("DEADLINE_EXCEEDED", True),
        ("INTERNAL_ERROR", False),
        ("NO_WORKER", False),
        ("QUEUE_FULL", False),
    ],
)
def test_what_failed_for_our_own_fault_is_free(outcome: str, billed: bool) -> None:
    assert is_billed(outcome) is billed


def line(index: int) -> Line:
    return Line(f"r{index}", "a", "k", "m", 1_764_590_400.0, "stop", Tokens(3, 1, 2), 0, 10)


class FailingLedger(Ledger):
    """Refuses some writes, and sometimes only after they were done."""

    def __init__(self, database: Database, script: Sequence[str]) -> None:
        super().__init__(database)
        self._script = list(script)

    async def record(self, lines: Sequence[Line]) -> int:
        step = self._script.pop(0) if self._script else "ok"
        if step == "before":
            raise StoreUnavailable("no disk")
        done = await super().record(lines)
        if step == "after":
            raise StoreUnavailable("the connection broke during the commit")
        return done


@pytest.mark.parametrize("script", [[], ["before"], ["after"], ["before", "after", "before"]])
async def test_every_line_is_written_once_whatever_fails(
    script: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(books, "FLUSH_S", 0.01)
    monkeypatch.setattr(books, "RETRY_S", 0.01)
    monkeypatch.setattr(books, "GROUP", 7)
    database = await Database.open(f"sqlite:///{tmp_path / 'store.db'}")
    kept = LedgerBooks(FailingLedger(database, script))
    running = asyncio.create_task(kept.run())
    for index in range(40):
        kept.enter(line(index))
        if index % 10 == 0:
            await asyncio.sleep(0.02)
    async with asyncio.timeout(20):
        while sum(one.num_requests for one in await Ledger(database).sums([])) < 40:
            await asyncio.sleep(0.02)
    running.cancel()
    (total,) = await Ledger(database).sums([])
    assert (total.num_requests, total.micro_neurons) == (40, 400)
    await database.close()


async def test_the_end_of_the_process_writes_the_rest(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    database = await Database.open(url)
    kept = LedgerBooks(Ledger(database))
    kept.enter(line(1))
    await books.close_books(kept, database)
    database = await Database.open(url)
    assert [one.num_requests for one in await Ledger(database).sums([])] == [1]
    await database.close()
