"""A database by its URL, with the schema that this version of Meshfire knows.

Owns connections, transactions and what a committed transaction promises: SQLite runs in WAL mode with full
synchronisation, and a write takes the write lock when it begins, so that it never fails half-way for having read first.
PostgreSQL keeps its server's settings, which by default sync too. Knows no table.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, event, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DatabaseError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from meshfire.errors import BadInput, StoreUnavailable
from meshfire.store.migrate import upgrade

#: how long a writer waits for another one
BUSY_TIMEOUT_S = 10.0
_WRITES = "meshfire_writes"
_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+psycopg"}


class Database:
    """Transactions on one database. `open` makes it, `close` ends it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._writing = engine.execution_options(**{_WRITES: True})

    @classmethod
    async def open(cls, url: str) -> Database:
        """Connect, and bring the schema up to date. Raises BadInput for the URL, StoreUnavailable."""
        database = cls(_engine_for(_parsed(url)))
        try:
            async with database.write() as connection:
                await connection.run_sync(upgrade)
        except BaseException:
            await database.close()
            raise
        return database

    async def close(self) -> None:
        """Give the connections back."""
        await self._engine.dispose()

    @property
    def dialect(self) -> str:
        """`sqlite` or `postgresql`."""
        return self._engine.dialect.name

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that only reads. Raises StoreUnavailable."""
        with _told():
            async with self._engine.begin() as connection:
                yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """A transaction: committed, and on disk, once the block is left without an error. Raises StoreUnavailable."""
        with _told():
            async with self._writing.begin() as connection:
                yield connection


@contextmanager
def _told() -> Iterator[None]:
    """The driver's own trouble (no server, disk or lock) as one error of ours; a broken statement stays a defect."""
    try:
        yield
    except DBAPIError as error:
        if isinstance(error, OperationalError | InterfaceError) or type(error) is DatabaseError:
            raise StoreUnavailable(f"the store cannot be used: {_cause(error)}") from error
        raise
    except OSError as error:
        raise StoreUnavailable(f"the store cannot be reached: {error}") from error


def _cause(error: DBAPIError) -> str:
    return str(error.orig).strip().splitlines()[0] if error.orig is not None else str(error)


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise BadInput(
            "the store's URL cannot be read, expected sqlite:///PATH or postgresql://…", field="store_url"
        ) from None
    driver = _DRIVERS.get(parsed.get_backend_name())
    if driver is None:
        message = f"the store is {parsed.get_backend_name()!r}, expected sqlite or postgresql"
        raise BadInput(message, field="store_url")
    if driver == _DRIVERS["sqlite"] and not parsed.database:
        raise BadInput("the store's URL names no file, expected sqlite:///PATH", field="store_url")
    return parsed.set(drivername=driver)


def _engine_for(url: URL) -> AsyncEngine:
    if url.get_backend_name() == "postgresql":
        return create_async_engine(url, pool_pre_ping=True)
    file = Path(str(url.database))
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnavailable(f"{file.parent} cannot be made: {error.strerror}") from None
    engine = create_async_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, record: object) -> None:
    connection.isolation_level = None  # transactions are ours to begin, see _begin_sqlite
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
