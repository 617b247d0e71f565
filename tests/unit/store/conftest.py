"""The databases that the store's tests run on: SQLite always, PostgreSQL where its server is installed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from meshfire.store.database import Database
from tests.postgres import PostgresServer, find_postgres


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    binaries = find_postgres()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed")
    with PostgresServer(binaries) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.db'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture
async def database(store_url: str) -> AsyncIterator[Database]:
    opened = await Database.open(store_url)
    yield opened
    await opened.close()
