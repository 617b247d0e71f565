"""The memory behind KV blocks: one tensor [L, num_blocks, P, W], implementing the models' KvView.

Owns bytes, not their meaning: who uses a block is the pool's business, which tokens it holds the engine's.
Writes and reads run on the model thread; a block that is being exported is held by a lease and no longer written.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from meshfire.errors import InvalidTensor
from meshfire.model.interface import KvGeometry


class KvStore:
    """KV rows of `num_blocks` blocks; slot = block x P + offset.

    `memory`: zeroed bytes to use, at least num_blocks x block_bytes (uint8), for a cache that processes share.
    """

    def __init__(self, geometry: KvGeometry, num_blocks: int, memory: Tensor | None = None) -> None:
        self.geometry = geometry
        self.num_blocks = num_blocks
        shape = (geometry.num_layers, num_blocks, geometry.block_tokens, geometry.row_width)
        num_bytes = math.prod(shape) * geometry.dtype.itemsize
        if memory is None:
            # numpy's zeros come from calloc: memory is taken as blocks are first written, not at the start.
            memory = torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))
        self._blocks = memory[:num_bytes].view(geometry.dtype).view(shape)
        self._slots = self._blocks.view(geometry.num_layers, -1, geometry.row_width)

    def write(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Store `rows` [T, W] of one layer at `slots` [T] int64."""
        self._slots[layer].index_copy_(0, slots, rows.to(self.geometry.dtype))

    def read(self, layer: int, block_table: Tensor, num_tokens: int) -> Tensor:
        """The first `num_tokens` rows of the sequence whose blocks are `block_table` [B] int64: [num_tokens, W]."""
        rows = self._blocks[layer].index_select(0, block_table)
        return rows.view(-1, self.geometry.row_width)[:num_tokens]

    @property
    def blocks(self) -> Tensor:
        """All of it: [L, num_blocks, P, W]."""
        return self._blocks

    def export_block(self, block: int, *, num_tokens: int | None = None) -> Tensor:
        """A copy of one block over all layers: [L, P, W]. Rows past `num_tokens` (default: P) are zero.

        A partial block's other rows may still hold what an earlier sequence left there; they never leave the worker.
        """
        copy = self._blocks[:, block].clone(memory_format=torch.contiguous_format)
        if num_tokens is not None:
            copy[:, num_tokens:] = 0
        return copy

    def import_layers(self, block: int, layer_start: int, rows: Tensor) -> None:
        """Overwrite layers `layer_start …` of one block with `rows` [num_layers, P, W]. Raises InvalidTensor."""
        geometry = self.geometry
        fits = rows.dim() == 3 and 0 <= layer_start <= geometry.num_layers - rows.shape[0]
        if not fits or tuple(rows.shape[1:]) != (geometry.block_tokens, geometry.row_width):
            raise InvalidTensor(
                f"KV of shape {tuple(rows.shape)} at layer {layer_start} does not fit blocks of "
                f"[{geometry.num_layers}, {geometry.block_tokens}, {geometry.row_width}]",
                field="block.data",
            )
        if rows.dtype != geometry.dtype:
            raise InvalidTensor(f"KV of {rows.dtype}, expected {geometry.dtype}", field="block.data")
        self._blocks[layer_start : layer_start + rows.shape[0], block] = rows
