"""This end of the lease of a KV that waits at a prefill worker: what must come, and how far it is.

Owns the record; the rules of its steps are `meshfire.kv.lease`'s, the reading is `kv_reader`'s.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from meshfire.kv import lease as kv_lease
from meshfire.kv.hashing import chain_hashes
from meshfire.kv.transfer import KvManifest
from meshfire.model.interface import KvGeometry
from services.decode.kv_reader import KvSource
from services.decode.order import Order


@dataclass(eq=False)
class ReadLease:
    """Granted to this worker. `manifest` is what this side expects to be told."""

    source: KvSource
    manifest: KvManifest
    #: the same state machine as at the KV's owner
    kv: kv_lease.KvLease

    @property
    def released(self) -> bool:
        """Whether its owner was told that it is over."""
        return self.kv.released

    @property
    def acknowledged(self) -> bool:
        """Of a released one: whether all was read and verified."""
        return self.kv.outcome is kv_lease.Outcome.ACKNOWLEDGED

    def advance(self, event: type[kv_lease.ReaderEvent]) -> None:
        """One step. Raises IllegalTransition for a step out of order."""
        reader_id = self.kv.reader_id
        assert reader_id is not None, "a decode worker's lease is granted to it"
        self.kv = kv_lease.apply(self.kv, event(self.kv.epoch, reader_id, time.monotonic()))


def granted(order: Order, source: KvSource, geometry: KvGeometry, model_revision: str, worker_id: str) -> ReadLease:
    """The lease of an order's KV. `worker_id` is the reader that it was granted to: this worker."""
    hashes = tuple(
        chain_hashes(order.token_ids, geometry.block_tokens, model_revision=model_revision, cache_salt=order.cache_salt)
    )
    now = time.monotonic()
    offered = kv_lease.offer(
        source.kv_lease_id,
        owner_id=source.address,
        epoch=source.epoch,
        block_hashes=hashes,
        now=now,
        last_deadline=order.deadline,
    )
    kv = kv_lease.apply(offered, kv_lease.Granted(source.epoch, worker_id, now))
    return ReadLease(source, KvManifest(model_revision, geometry, len(order.token_ids), hashes), kv)
