"""Requests per minute, also from several gateways at once."""

from __future__ import annotations

import asyncio

from sqlalchemy import func, select

from meshfire.store.database import Database
from meshfire.store.request_windows import RequestWindows
from meshfire.store.schema import request_windows


class _Clock:
    def __init__(self) -> None:
        self.now = 1_764_590_410.0  # 10 s into a minute

    def __call__(self) -> float:
        return self.now


async def test_every_account_and_scope_has_its_own_minute(database: Database) -> None:
    clock = _Clock()
    windows = RequestWindows(database, clock)
    assert await windows.count("a", "chat") == (1, 50.0)
    assert await windows.count("a", "chat") == (2, 50.0)
    assert (await windows.count("a", "kimi"))[0] == 1
    assert (await windows.count("b", "chat"))[0] == 1
    clock.now += 49.5
    assert await windows.count("a", "chat") == (3, 0.5)
    clock.now += 0.5
    assert await windows.count("a", "chat") == (1, 60.0)


async def test_gateways_count_together(store_url: str) -> None:
    databases = [await Database.open(store_url) for _ in range(3)]
    gateways = [RequestWindows(one, _Clock()) for one in databases]
    counted = await asyncio.gather(*(gateway.count("a", "chat") for gateway in gateways for _ in range(10)))
    assert sorted(count for count, _ in counted) == list(range(1, 31))
    for one in databases:
        await one.close()


async def test_old_minutes_are_forgotten(database: Database) -> None:
    clock = _Clock()
    windows = RequestWindows(database, clock)
    for _ in range(30):
        await windows.count("a", "chat")
        clock.now += 60
    async with database.read() as connection:
        kept = (await connection.execute(select(func.count()).select_from(request_windows))).scalar_one()
    assert kept <= 6
