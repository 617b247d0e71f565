"""Files: kept, read, listed, removed; each account's own."""

from __future__ import annotations

import pytest

from meshfire.errors import BadInput, NotFound
from meshfire.store.database import Database
from meshfire.store.files import MAX_FILE_BYTES, Files

MINE, OTHER = "a" * 32, "b" * 32


async def test_a_file_from_upload_to_its_end(database: Database) -> None:
    now = 1000.0
    files = Files(database, retention_s=60, clock=lambda: now)
    content = bytes(range(256)) * 50
    made = await files.add(MINE, "in.jsonl", "batch", content)
    assert await files.file(MINE, made.file_id) == made
    assert await files.content(MINE, made.file_id) == content
    assert await files.list_files(MINE) == [made]
    assert await files.list_files(OTHER) == []
    for call in (files.file, files.content, files.remove):
        with pytest.raises(NotFound):
            await call(OTHER, made.file_id)
    now += 60
    assert await files.forget() == 1
    with pytest.raises(NotFound):
        await files.remove(MINE, made.file_id)


async def test_sizes(database: Database) -> None:
    files = Files(database, retention_s=60)
    for content in (b"", b"x" * (MAX_FILE_BYTES + 1)):
        with pytest.raises(BadInput) as caught:
            await files.add(MINE, "in.jsonl", "batch", content)
        assert caught.value.field == "file"
