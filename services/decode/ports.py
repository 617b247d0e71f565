"""What the engine needs from outside beside `meshfire.worker.ports`, as a small Protocol for test doubles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from meshfire.kv.transfer import KvManifest
from services.decode.kv_reader import KvRead, KvSource


class Reader(Protocol):
    """Reads KV from prefill workers; services.decode.kv_reader.KvReader is one."""

    async def read(
        self, source: KvSource, wanted: KvManifest, block_table: Sequence[int], num_held_blocks: int
    ) -> KvRead:
        """Fill the blocks that are not held; raises what went wrong."""

    async def release(self, source: KvSource, *, acknowledged: bool) -> None:
        """End the KV's lease at its owner; never fails."""
