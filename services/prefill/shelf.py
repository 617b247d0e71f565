"""Offered KV and who may fetch it: every lease from its offer to its release.

Owns the blocks of finished prompts and frees each exactly once, on its lease's step into RELEASED; the rules of those
steps are `meshfire.kv.lease`'s. Knows no wire and no model. Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from meshfire.errors import KvExpired, KvNotGranted
from meshfire.kv import lease as kv
from meshfire.kv.block_pool import BlockPool
from meshfire.kv.lease import KvLease, LeaseState, LeaseTimeouts
from services.prefill.prompt import Prefilled, Prompt

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Offered:
    """One lease and what it is about."""

    prompt: Prompt
    prefilled: Prefilled
    lease: KvLease
    #: replaced at each step, so that each waiter sees every step
    stepped: asyncio.Event = field(default_factory=asyncio.Event)
    #: test hook: one sent frame still has to be corrupted
    corruption_due: bool = False


class KvShelf:
    """All offered KV of this worker."""

    def __init__(
        self,
        pool: BlockPool,
        owner_id: str,
        timeouts: LeaseTimeouts,
        *,
        grant_wait_s: float = 1.0,
        on_freed: Callable[[], None] = lambda: None,
    ) -> None:
        self._pool = pool
        self._owner_id = owner_id
        self._timeouts = timeouts
        self._grant_wait_s = grant_wait_s
        self._on_freed = on_freed
        self._offered: dict[str, Offered] = {}
        self._deadlines_changed = asyncio.Event()
        #: set while nothing is offered
        self.empty = asyncio.Event()
        self.empty.set()

    def __len__(self) -> int:
        return len(self._offered)

    def offer(self, prompt: Prompt, prefilled: Prefilled) -> KvLease:
        """Take over a finished prompt with its block references."""
        lease = kv.offer(
            uuid.uuid4().hex,
            owner_id=self._owner_id,
            epoch=prompt.key.epoch,
            block_hashes=prefilled.manifest.block_hashes,
            now=time.monotonic(),
            last_deadline=prompt.deadline,
            timeouts=self._timeouts,
        )
        corrupt = prompt.fault is not None and prompt.fault.aims_at("kv", self._owner_id)
        self._offered[lease.lease_id] = Offered(prompt, prefilled, lease, corruption_due=corrupt)
        self.empty.clear()
        self._deadlines_changed.set()
        return lease

    def grant(self, lease_id: str, epoch: int, reader_id: str) -> None:
        """Name the reader. Raises KvExpired, StaleEpoch, IllegalTransition."""
        self.step(self._find(lease_id), kv.Granted(epoch, reader_id, time.monotonic()))

    async def begin_read(self, lease_id: str, epoch: int, reader_id: str) -> KvRead:
        """Start a read. A grant that is still on its way (it takes another stream) is awaited for a moment.

        Raises KvExpired, StaleEpoch, KvNotGranted, IllegalTransition.
        """
        offered = self._find(lease_id)
        try:
            async with asyncio.timeout(self._grant_wait_s):
                while _awaits_grant(offered.lease, epoch):
                    await offered.stepped.wait()
        except TimeoutError:
            raise KvNotGranted(
                f"no grant of KV lease {lease_id} at epoch {epoch} came within {self._grant_wait_s} s"
            ) from None
        self.step(offered, kv.ReadStarted(epoch, reader_id, time.monotonic()))
        return KvRead(self, offered)

    def hold(self, read: KvRead) -> None:
        """A read begins: its blocks stay whatever becomes of the lease."""
        self._pool.share(read.offered.prefilled.blocks)

    def let_go(self, read: KvRead) -> None:
        """A read ended. If it broke off and still has the lease, its reader may come again."""
        lease = read.lease
        assert lease.reader_id is not None
        self._pool.release(read.offered.prefilled.blocks)
        if not read.is_complete and read.offered.lease is lease:
            self.step(read.offered, kv.ReadAborted(lease.epoch, lease.reader_id, time.monotonic()))
        self._on_freed()

    def release(self, lease_id: str, epoch: int, reader_id: str, *, acknowledged: bool) -> None:
        """The reader is done. A lease that is gone is no error. Raises StaleEpoch, KvNotGranted, IllegalTransition."""
        offered = self._offered.get(lease_id)
        if offered is None:
            return
        now = time.monotonic()
        if acknowledged:
            self.step(offered, kv.Acknowledged(epoch, reader_id, now))
        self.step(offered, kv.Released(epoch, reader_id, now))

    def withdraw(self, wanted: Callable[[Prompt], bool]) -> None:
        """End every lease whose prompt is `wanted`: cancelled, or its router is gone."""
        for offered in list(self._offered.values()):
            if wanted(offered.prompt):
                self.step(offered, kv.OwnerReleased())

    async def expire(self) -> None:
        """Run for ever: end leases whose time is up."""
        while True:
            self._deadlines_changed.clear()
            now = time.monotonic()
            for offered in list(self._offered.values()):
                self.step(offered, kv.TimedOut(now))
            next_deadline = min((one.lease.deadline for one in self._offered.values()), default=None)
            try:
                async with asyncio.timeout(None if next_deadline is None else next_deadline - time.monotonic()):
                    await self._deadlines_changed.wait()
            except TimeoutError:
                continue

    def step(self, offered: Offered, event: kv.Event) -> None:
        """Apply one event, and free the blocks if it released the lease. Raises what `lease.apply` raises."""
        before = offered.lease
        offered.lease = kv.apply(before, event)
        if offered.lease is before:
            return
        offered.stepped.set()
        offered.stepped = asyncio.Event()
        self._deadlines_changed.set()
        if offered.lease.released and not before.released:
            self._free(offered)

    def _free(self, offered: Offered) -> None:
        lease = offered.lease
        assert lease.outcome is not None
        log.debug("KV lease %s of request %s: %s", lease.lease_id, offered.prompt.key.request_id, lease.outcome.value)
        del self._offered[lease.lease_id]
        self._pool.release(offered.prefilled.blocks)
        if not self._offered:
            self.empty.set()
        self._on_freed()

    def _find(self, lease_id: str) -> Offered:
        offered = self._offered.get(lease_id)
        if offered is None:
            raise KvExpired(f"KV lease {lease_id[:64]!r} is not here: released, expired, or its owner restarted")
        return offered


class KvRead:
    """One read under way, as a context manager: on leaving without `complete`, the reader may try again.

    Holds its own reference to every block, so that an expiry in its middle cannot give them to another prompt.
    """

    def __init__(self, shelf: KvShelf, offered: Offered) -> None:
        self._shelf = shelf
        self.offered = offered
        #: the lease as this read started it; any other value means that the read has lost it
        self.lease = offered.lease
        self.is_complete = False

    def __enter__(self) -> Self:
        self._shelf.hold(self)
        return self

    def check(self) -> None:
        """Raise KvExpired if the lease was released, or granted to another reader, since the read began."""
        if self.offered.lease is not self.lease:
            raise KvExpired(f"KV lease {self.lease.lease_id} was ended by its owner during the read")

    def complete(self) -> None:
        """Everything was sent; the reader's acknowledgement is what comes next."""
        self.is_complete = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._shelf.let_go(self)


def _awaits_grant(lease: KvLease, epoch: int) -> bool:
    return not lease.released and (lease.state is LeaseState.OFFERED or epoch > lease.epoch) and epoch >= lease.epoch
