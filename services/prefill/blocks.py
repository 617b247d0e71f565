"""The KV blocks of one sequence while its prompt is computed.

Owns the reuse of a cached prefix and the rule that nothing leaks: on leaving the `with` block every reference is
released, unless `keep()` handed them on. Knows no tensor.

    block       0 … num_cached - 1            num_cached … B - 1
                matched by hash, full         allocated; full ones are published as they are computed
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from meshfire.kv.block_pool import BlockPool
from services.prefill.prompt import Stop
from services.prefill.under_way import UnderWay


class SequenceBlocks:
    """A context manager. `blocks` covers the whole prompt; raises NoFreeBlocks on entry.

    Without `reuse` every token is to be computed, whatever is cached.
    """

    def __init__(
        self, pool: BlockPool, hashes: Sequence[bytes], num_tokens: int, block_tokens: int, *, reuse: bool = True
    ) -> None:
        self._pool = pool
        self._hashes = hashes
        self._num_tokens = num_tokens
        self._block_tokens = block_tokens
        # At least one token is computed anew: the last hidden state is not cached.
        self._reusable = hashes[: (num_tokens - 1) // block_tokens if reuse else 0]
        self._num_published = 0
        self._kept = False
        self.blocks: list[int] = []
        self.num_cached_tokens = 0

    def __enter__(self) -> Self:
        matched = self._pool.match(self._reusable)
        try:
            fresh = self._pool.allocate(len(self._hashes) - len(matched))
        except BaseException:
            self._pool.release(matched)
            raise
        self.blocks = matched + fresh
        self._num_published = len(matched)
        self.num_cached_tokens = len(matched) * self._block_tokens
        return self

    async def wait_for(self, under_way: UnderWay, stop: Stop) -> None:
        """Before entering: until the prefix that could be reused is ready, or no other prompt computes more of it."""
        await under_way.wait(self._reusable, lambda: self._pool.num_matched(self._reusable), stop)

    @property
    def to_compute(self) -> Sequence[bytes]:
        """Hashes of the full blocks that are not there yet."""
        return self._hashes[self._num_published : self._num_tokens // self._block_tokens]

    def publish_up_to(self, num_tokens: int) -> None:
        """The first `num_tokens` tokens are computed: share the blocks that they fill."""
        num_full = num_tokens // self._block_tokens
        for index in range(self._num_published, num_full):
            self._pool.publish(self.blocks[index], self._hashes[index])
        self._num_published = max(self._num_published, num_full)

    def keep(self) -> tuple[int, ...]:
        """Hand the references to the caller."""
        self._kept = True
        return tuple(self.blocks)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if not self._kept:
            self._pool.release(self.blocks)
