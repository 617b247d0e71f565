"""One KV cache for all ranks of a worker: memory that they share, and each rank's columns of it.

Owns an anonymous memory file, which vanishes with its last process. Rank 0's engine sees an ordinary store of whole
rows, so KV travels, is cached and spilled as in a worker of one process; a rank's decoder sees the columns of its
heads. A row that belongs to every rank (MLA's latent) is there once: all ranks write the same bits to it.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import replace

import torch
from torch import Tensor

from meshfire.kv.store import KvStore
from meshfire.model.interface import KvGeometry
from meshfire.model.partition import KvColumns


class SharedMemory:
    """`num_bytes` zeroed bytes behind a file descriptor that child processes may inherit."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        self.values = torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """New memory; pages are taken as they are first written."""
        fd = os.memfd_create("meshfire-kv", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        return cls(fd, num_bytes)

    def close_fd(self) -> None:
        """The mapping stays until the last tensor over it is gone."""
        os.close(self.fd)


class RankKv:
    """The columns of one rank in a store of whole rows: a KvView."""

    def __init__(self, store: KvStore, columns: KvColumns, rank: int, size: int) -> None:
        self.geometry: KvGeometry = replace(store.geometry, row_width=columns.rank_width(size))
        self._blocks = _columns_of(store.blocks, columns.num_sections, rank, size)
        self._slots = self._blocks.flatten(1, 2)

    def write(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Store this rank's `rows` [T, w] of one layer at `slots` [T] int64."""
        values = rows.to(self.geometry.dtype).view(rows.shape[0], *self._slots.shape[2:])
        self._slots[layer].index_copy_(0, slots, values)

    def read(self, layer: int, block_table: Tensor, num_tokens: int) -> Tensor:
        """The first `num_tokens` rows of a sequence: [num_tokens, w]."""
        rows = self._blocks[layer].index_select(0, block_table)
        return rows.reshape(-1, self.geometry.row_width)[:num_tokens]


def _columns_of(blocks: Tensor, num_sections: int, rank: int, size: int) -> Tensor:
    """A view of [L, num_blocks, P, W]: [L, num_blocks, P, sections, columns of one rank in a section]."""
    if num_sections == 0:
        return blocks[..., None, :]
    return blocks.view(*blocks.shape[:3], num_sections, size, -1)[..., rank, :]
