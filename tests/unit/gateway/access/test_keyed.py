"""The door that asks for keys, on a real store with a clock of its own."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from meshfire.errors import StoreUnavailable
from meshfire.metering.neurons import FREE_NEURONS_PER_DAY, MICRO, Tokens
from meshfire.store.accounts import Account, Accounts, Plan
from meshfire.store.database import Database
from meshfire.store.ledger import Ledger, Line
from meshfire.store.request_windows import RequestWindows
from services.gateway.access.keyed import KeyedDoor
from services.gateway.access.visitor import Visitor
from services.gateway.errors import HttpError

TEN_TO_MIDNIGHT = 1_764_633_000.0  # 2025-12-01 23:50 UTC


class Keys:
    """A store with a door, and what tests do with both."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.accounts = Accounts(database)
        self.ledger = Ledger(database)
        self.now = TEN_TO_MIDNIGHT

    def door(self, **more: Any) -> KeyedDoor:
        limits: dict[str, Any] = {"requests_per_minute": 300, "model_limits": {}, "max_concurrent": 64} | more
        windows = RequestWindows(self.database, lambda: self.now)
        return KeyedDoor(self.accounts, windows, self.ledger, **limits, clock=lambda: self.now)

    async def token_of(self, **more: Any) -> tuple[Account, str]:
        account = await self.accounts.create_account("one", **more)
        _, token = await self.accounts.create_key(account.account_id, "laptop")
        return account, token

    async def spend(self, account: Account, neurons: int) -> None:
        line = Line(f"r{self.now}", account.account_id, "k", "m", self.now, "stop", Tokens(1), 0, neurons * MICRO)
        await self.ledger.record([line])


@pytest.fixture
async def keys(tmp_path: Path) -> AsyncIterator[Keys]:
    database = await Database.open(f"sqlite:///{tmp_path / 'store.db'}")
    yield Keys(database)
    await database.close()


def bearer(token: str) -> Headers:
    return Headers({"authorization": f"Bearer {token}"})


async def refusal(door: KeyedDoor, visitor: Visitor, model: str = "m") -> HttpError:
    with pytest.raises(HttpError) as caught:
        async with door.admitted(visitor, model):
            pass
    assert caught.value.status == 429
    return caught.value


async def passes(door: KeyedDoor, visitor: Visitor, model: str = "m", times: int = 1) -> None:
    for _ in range(times):
        async with door.admitted(visitor, model):
            pass


async def test_a_token_in_every_spelling(keys: Keys) -> None:
    account, token = await keys.token_of()
    door = keys.door()
    for headers in (
        bearer(token),
        Headers({"authorization": f"bearer  {token} "}),
        Headers({"x-api-key": token}),
        Headers({"authorization": "Basic abc", "x-api-key": token}),
    ):
        assert (await door.enter(headers)).account_id == account.account_id


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer "}, {"authorization": "Bearer mf_wrong"}])
async def test_no_token_and_a_wrong_one(keys: Keys, headers: dict[str, str]) -> None:
    with pytest.raises(HttpError) as caught:
        await keys.door().enter(Headers(headers))
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert "mf_wrong" not in caught.value.message


async def test_a_revoked_key_is_refused_from_the_next_request_on(keys: Keys) -> None:
    _, token = await keys.token_of()
    door = keys.door()
    visitor = await door.enter(bearer(token))
    await keys.accounts.revoke_key(visitor.key_id)
    with pytest.raises(HttpError, match="not valid"):
        await door.enter(bearer(token))


async def test_a_path_of_another_account(keys: Keys) -> None:
    account, token = await keys.token_of()
    door = keys.door()
    assert (await door.enter(bearer(token), account.account_id)).account_id == account.account_id
    with pytest.raises(HttpError) as caught:
        await door.enter(bearer(token), "f" * 32)
    assert caught.value.status == 403


async def test_requests_per_minute(keys: Keys) -> None:
    _, token = await keys.token_of(plan=Plan.PAID)
    door = keys.door(requests_per_minute=3, model_limits={"frontier": 1})
    visitor = await door.enter(bearer(token))
    await passes(door, visitor, times=3)
    error = await refusal(door, visitor, "other")
    assert (error.code, error.headers["retry-after"]) == ("rate_limited", "60")
    await passes(door, visitor, "frontier")
    assert (await refusal(door, visitor, "frontier")).code == "rate_limited"
    keys.now += 60
    await passes(door, visitor, times=3)


async def test_an_account_may_have_limits_of_its_own(keys: Keys) -> None:
    _, token = await keys.token_of(plan=Plan.PAID, requests_per_minute=1, max_concurrent=0)
    door = keys.door()
    visitor = await door.enter(bearer(token))
    assert (await refusal(door, visitor)).code == "concurrency_limited"
    _, token = await keys.token_of(plan=Plan.PAID, requests_per_minute=1)
    visitor = await door.enter(bearer(token))
    await passes(door, visitor)
    assert (await refusal(door, visitor)).code == "rate_limited"


async def test_requests_at_once(keys: Keys) -> None:
    _, token = await keys.token_of()
    door = keys.door(max_concurrent=2)
    visitor = await door.enter(bearer(token))
    async with door.admitted(visitor, "m"):
        with pytest.raises(ZeroDivisionError):
            async with door.admitted(visitor, "m"):
                assert (await refusal(door, visitor)).code == "concurrency_limited"
                raise ZeroDivisionError
        await passes(door, visitor)


async def test_the_free_neurons_of_a_day(keys: Keys) -> None:
    account, token = await keys.token_of()
    door = keys.door()
    visitor = await door.enter(bearer(token))
    await keys.spend(account, FREE_NEURONS_PER_DAY - 1)
    await passes(door, visitor)
    keys.now += 1
    await keys.spend(account, 1)
    error = await refusal(door, visitor)
    assert (error.code, error.headers["retry-after"]) == ("account_limited", str(599))
    keys.now += 600
    await passes(door, visitor)


async def test_a_paid_account_goes_on(keys: Keys) -> None:
    account, token = await keys.token_of(plan=Plan.PAID)
    door = keys.door()
    await keys.spend(account, 100 * FREE_NEURONS_PER_DAY)
    await passes(door, await door.enter(bearer(token)))


async def test_without_its_store_the_door_lets_nobody_in(keys: Keys, tmp_path: Path) -> None:
    _, token = await keys.token_of()
    door = keys.door()
    await keys.database.close()
    await asyncio.to_thread(shutil.rmtree, tmp_path)
    with pytest.raises(StoreUnavailable):
        await door.enter(bearer(token))
