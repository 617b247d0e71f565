"""Transactions and migrations on both databases."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, insert, select, text

from meshfire.errors import BadInput, StoreUnavailable
from meshfire.store.database import Database
from meshfire.store.schema import accounts, metadata

ACCOUNT = {"id": "a" * 32, "name": "one", "plan": "free", "created_at": 1}


async def test_the_migrations_make_the_schema(database: Database) -> None:
    def differences(connection: Connection) -> list[object]:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, metadata))

    async with database.read() as connection:
        assert await connection.run_sync(differences) == []


async def test_many_may_open_a_new_database_at_once(store_url: str) -> None:
    opened = await asyncio.gather(*(Database.open(store_url) for _ in range(4)))
    async with opened[0].write() as connection:
        await connection.execute(insert(accounts).values(ACCOUNT))
    async with opened[3].read() as connection:
        assert len((await connection.execute(select(accounts))).all()) == 1
    for one in opened:
        await one.close()


async def test_a_block_that_fails_writes_nothing(database: Database) -> None:
    with pytest.raises(RuntimeError):
        async with database.write() as connection:
            await connection.execute(insert(accounts).values(ACCOUNT))
            raise RuntimeError
    async with database.read() as connection:
        assert (await connection.execute(select(accounts))).all() == []


async def test_writers_wait_for_each_other(database: Database) -> None:
    """Read, think, write: with the lock taken at the first read, no update is lost and nobody fails half-way."""
    async with database.write() as connection:
        await connection.execute(insert(accounts).values({**ACCOUNT, "requests_per_minute": 0}))

    async def count_up() -> None:
        async with database.write() as connection:
            query = select(accounts.c.requests_per_minute).with_for_update()
            seen = (await connection.execute(query)).scalar_one()
            await asyncio.sleep(0.002)
            await connection.execute(accounts.update().values(requests_per_minute=seen + 1))

    await asyncio.gather(*(count_up() for _ in range(20)))
    async with database.read() as connection:
        assert (await connection.execute(select(accounts.c.requests_per_minute))).scalar_one() == 20


async def test_sqlite_syncs_every_commit(tmp_path: Path) -> None:
    database = await Database.open(f"sqlite:///{tmp_path / 'deep' / 'store.db'}")
    async with database.read() as connection:
        assert (await connection.execute(text("PRAGMA journal_mode"))).scalar_one() == "wal"
        assert (await connection.execute(text("PRAGMA synchronous"))).scalar_one() == 2, "2 is FULL"
    await database.close()


@pytest.mark.parametrize("url", ["", "nonsense", "mysql://host/db", "sqlite://"])
async def test_a_wrong_url_names_the_setting(url: str) -> None:
    with pytest.raises(BadInput) as caught:
        await Database.open(url)
    assert caught.value.field == "store_url"


async def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable):
        await Database.open("postgresql://postgres@127.0.0.1:1/none")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable):
        await Database.open(f"sqlite:///{tmp_path / 'file' / 'store.db'}")


async def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    file.write_bytes(b"not a database" * 100)
    with pytest.raises(StoreUnavailable, match="not a database"):
        await Database.open(f"sqlite:///{file}")
