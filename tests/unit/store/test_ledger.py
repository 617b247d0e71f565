"""The ledger against sums done in Python; a request counts once."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

import pytest

from meshfire.metering.neurons import Tokens
from meshfire.store.clock import utc_day
from meshfire.store.database import Database
from meshfire.store.ledger import GroupBy, Ledger, Line

NOON = 1_764_590_400.0  # 2025-12-01 12:00 UTC
DAY_S = 86_400


def lines(count: int, seed: int = 0) -> list[Line]:
    draw = random.Random(seed)
    made = []
    for index in range(count):
        prompt = draw.randint(1, 5000)
        tokens = Tokens(prompt, draw.randint(0, prompt), draw.randint(0, 900))
        made.append(
            Line(
                request_id=f"r{seed}-{index}",
                account_id=draw.choice("ab") * 32,
                key_id=draw.choice("xyz") * 32,
                model=draw.choice(["kimi", "small"]),
                ended_at=NOON + draw.randint(0, 3) * DAY_S,
                outcome="stop",
                tokens=tokens,
                reasoning_tokens=draw.randint(0, tokens.output),
                micro_neurons=draw.randint(0, 10**12),
            )
        )
    return made


@pytest.mark.parametrize("by", [[GroupBy.DAY], [GroupBy.DAY, GroupBy.MODEL, GroupBy.KEY], [GroupBy.ACCOUNT]])
async def test_sums_are_those_of_the_lines(database: Database, by: list[GroupBy]) -> None:
    ledger, written = Ledger(database), lines(60)
    assert await ledger.record(written) == 60
    value = {
        GroupBy.DAY: lambda one: utc_day(one.ended_at),
        GroupBy.MODEL: lambda one: one.model,
        GroupBy.KEY: lambda one: one.key_id,
        GroupBy.ACCOUNT: lambda one: one.account_id,
    }
    expected: dict[tuple[str, ...], list[Line]] = defaultdict(list)
    for line in written:
        expected[tuple(value[one](line) for one in by)].append(line)
    sums = await ledger.sums(by)
    assert [one.group for one in sums] == sorted(expected)
    for one in sums:
        group = expected[one.group]
        assert one.num_requests == len(group)
        assert one.tokens == sum((line.tokens for line in group), Tokens())
        assert one.reasoning_tokens == sum(line.reasoning_tokens for line in group)
        assert one.micro_neurons == sum(line.micro_neurons for line in group)


async def test_a_request_is_billed_once(database: Database) -> None:
    ledger, written = Ledger(database), lines(20)
    await asyncio.gather(*(ledger.record(written) for _ in range(3)))
    assert await ledger.record(written + lines(1, seed=1)) == 1
    (total,) = await ledger.sums([])
    assert total.num_requests == 21
    for account in ("a" * 32, "b" * 32):
        by_day = await ledger.sums([GroupBy.DAY], account_id=account)
        assert by_day, "the seed gives lines to both"
        for one in by_day:
            assert await ledger.spent(account, one.group[0]) == one.micro_neurons


async def test_days_are_utc_and_inclusive(database: Database) -> None:
    ledger = Ledger(database)
    await ledger.record(lines(40))
    days = [one.group[0] for one in await ledger.sums([GroupBy.DAY], first_day="2025-12-02", last_day="2025-12-03")]
    assert days == ["2025-12-02", "2025-12-03"]
    assert await ledger.spent("a" * 32, "2025-11-30") == 0
    assert await Ledger(database).sums([GroupBy.DAY], account_id="c" * 32) == []
