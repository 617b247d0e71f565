"""Files of the batch dialects."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, delete, insert, select

from meshfire.errors import BadInput, NotFound
from meshfire.store.clock import Clock, millis, wall_clock
from meshfire.store.database import Database
from meshfire.store.schema import files

MAX_FILE_BYTES = 10 * 1024 * 1024
MAX_NAME_CHARS = 512
_FACTS = (files.c.id, files.c.name, files.c.purpose, files.c.num_bytes, files.c.created_at, files.c.expires_at)


@dataclass(frozen=True)
class StoredFile:
    """A file without its content. Times in seconds since 1970."""

    file_id: str
    name: str
    purpose: str
    num_bytes: int
    created_at: float
    expires_at: float


class Files:
    """Files of all accounts; a caller names its own, and sees no other's."""

    def __init__(self, database: Database, *, retention_s: float, clock: Clock = wall_clock) -> None:
        self._database = database
        self._retention_s = retention_s
        self._clock = clock

    async def add(self, account_id: str, name: str, purpose: str, content: bytes) -> StoredFile:
        """Keep a file: on disk when this returns. Raises BadInput, StoreUnavailable."""
        if len(content) > MAX_FILE_BYTES:
            raise BadInput(f"{len(content)} bytes, expected at most {MAX_FILE_BYTES}", field="file")
        if not content:
            raise BadInput("the file is empty", field="file")
        now_s = self._clock()
        made = StoredFile(
            f"file-{uuid.uuid4().hex[:24]}",
            name[:MAX_NAME_CHARS],
            purpose,
            len(content),
            now_s,
            now_s + self._retention_s,
        )
        values = {
            "id": made.file_id,
            "account_id": account_id,
            "name": made.name,
            "purpose": purpose,
            "content": content,
            "num_bytes": made.num_bytes,
            "created_at": millis(made.created_at),
            "expires_at": millis(made.expires_at),
        }
        async with self._database.write() as connection:
            await connection.execute(insert(files).values(values))
        return made

    async def file(self, account_id: str, file_id: str) -> StoredFile:
        """Raises NotFound, also for another account's."""
        query = select(*_FACTS).where(files.c.id == file_id, files.c.account_id == account_id)
        async with self._database.read() as connection:
            row = (await connection.execute(query)).first()
        if row is None:
            raise _missing(file_id)
        return _file(row)

    async def content(self, account_id: str, file_id: str) -> bytes:
        """Raises NotFound."""
        query = select(files.c.content).where(files.c.id == file_id, files.c.account_id == account_id)
        async with self._database.read() as connection:
            found: bytes | None = (await connection.execute(query)).scalar_one_or_none()
        if found is None:
            raise _missing(file_id)
        return found

    async def list_files(self, account_id: str, limit: int = 100) -> list[StoredFile]:
        """Newest first."""
        query = select(*_FACTS).where(files.c.account_id == account_id)
        async with self._database.read() as connection:
            rows = (await connection.execute(query.order_by(files.c.created_at.desc()).limit(limit))).all()
        return [_file(row) for row in rows]

    async def remove(self, account_id: str, file_id: str) -> None:
        """Raises NotFound."""
        gone = delete(files).where(files.c.id == file_id, files.c.account_id == account_id)
        async with self._database.write() as connection:
            if (await connection.execute(gone)).rowcount == 0:
                raise _missing(file_id)

    async def forget(self) -> int:
        """Remove files that were kept long enough; how many."""
        async with self._database.write() as connection:
            return (await connection.execute(delete(files).where(files.c.expires_at <= millis(self._clock())))).rowcount


def _missing(file_id: str) -> NotFound:
    return NotFound(f"there is no file {file_id!r}", field="file_id")


def _file(row: Row[*tuple[Any, ...]]) -> StoredFile:
    return StoredFile(row.id, row.name, row.purpose, row.num_bytes, row.created_at / 1000, row.expires_at / 1000)
