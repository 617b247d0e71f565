"""`meshfire keys` and `meshfire usage` on a store of their own, as one would type them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshfire.cli.keys import keys
from meshfire.cli.usage import usage
from meshfire.errors import BadInput, NotFound
from meshfire.metering.neurons import Tokens
from meshfire.store.accounts import Accounts, Caller
from meshfire.store.database import Database
from meshfire.store.ledger import Ledger, Line


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'store.db'}"


def typed(group: object, *words: str) -> str:
    done = CliRunner().invoke(group, list(words), catch_exceptions=False)  # type: ignore[arg-type]
    assert done.exit_code == 0, done.output
    return done.output


def caller_of(store: str, token: str) -> Caller | None:
    async def ask() -> Caller | None:
        database = await Database.open(store)
        try:
            return await Accounts(database).caller(token)
        finally:
            await database.close()

    return asyncio.run(ask())


def test_a_key_from_its_making_to_its_end(store: str) -> None:
    made = json.loads(typed(keys, "create", "laptop", "--account", "lab", "--plan", "paid", "--store", store, "--json"))
    caller = caller_of(store, made["token"])
    assert caller is not None
    assert (caller.account.account_id, caller.account.name) == (made["account_id"], "lab")
    second = json.loads(typed(keys, "create", "server", "--account", "lab", "--store", store, "--json"))
    assert second["account_id"] == made["account_id"]
    listed = typed(keys, "list", "--store", store)
    assert "laptop" in listed
    assert made["token"] not in listed
    typed(keys, "revoke", made["key_id"], "--store", store)
    assert caller_of(store, made["token"]) is None
    assert "revoked" in typed(keys, "list", "--store", store)


def test_plan_and_limits_of_an_account_are_set_once(store: str) -> None:
    typed(keys, "create", "laptop", "--rpm", "5", "--store", store)
    with pytest.raises(BadInput, match="exists"):
        typed(keys, "create", "laptop", "--rpm", "6", "--store", store)
    with pytest.raises(NotFound):
        typed(keys, "revoke", "nothing", "--store", store)


def test_usage_adds_up(store: str) -> None:
    async def fill() -> None:
        database = await Database.open(store)
        noon = 1_764_590_400.0
        lines = [
            Line(
                f"r{index}",
                "a" * 32,
                "k",
                f"m{index % 2}",
                noon + 86_400 * (index % 3),
                "stop",
                Tokens(10, 4, 2),
                1,
                500,
            )
            for index in range(12)
        ]
        await Ledger(database).record(lines)
        await database.close()

    asyncio.run(fill())
    rows = json.loads(typed(usage, "--by", "model", "--since", "2025-12-02", "--store", store, "--json"))
    assert [(row["model"], row["requests"], row["input_tokens"]) for row in rows] == [("m0", 4, 40), ("m1", 4, 40)]
    assert rows[0]["neurons"] == pytest.approx(4 * 500 / 1e6)
    table = typed(usage, "--store", store).splitlines()
    assert table[0].split() == [
        *("day", "model", "key"),
        *("requests", "input", "cached", "output", "reasoning", "neurons", "$"),
    ]
    assert table[1].split()[:7] == ["2025-12-01", "m0", "k", "2", "20", "8", "4"]


def test_an_empty_store(store: str) -> None:
    assert typed(usage, "--store", store).strip() == "nothing was used"
    assert "meshfire keys create" in typed(keys, "list", "--store", store)
