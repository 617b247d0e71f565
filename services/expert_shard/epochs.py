"""Which placement epochs this shard serves, and with which experts in memory.

Owns the order of a change: load what the new epoch needs, then serve it beside the old one, then drop what no retained
epoch names. Knows the document's place in discovery; knows nothing of hops beyond their epoch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from meshfire.discovery.base import Registry
from meshfire.errors import CheckpointError, InvalidPlacement, MeshfireError, Refused, StaleEpoch
from meshfire.placement.shard_map import Expert, ShardMap, placement_key
from services.expert_shard.core import ExpertStore

log = logging.getLogger(__name__)

#: epochs served side by side: the last one and the one that callers are leaving
RETAINED_EPOCHS = 2


class EpochBook:
    """Epochs, ascending, each with the experts that it needs of this shard."""

    def __init__(
        self,
        store: ExpertStore,
        registry: Registry,
        *,
        model: str,
        model_revision: str,
        shard_id: str,
        always: frozenset[Expert] = frozenset(),
    ) -> None:
        #: set once an epoch is served
        self.placed = asyncio.Event()
        self._store = store
        self._registry = registry
        self._model = model
        self._model_revision = model_revision
        self._shard_id = shard_id
        self._always = always
        self._needs: dict[int, frozenset[Expert]] = {}
        self._changed = asyncio.Event()
        self._changing = asyncio.Lock()

    @property
    def epochs(self) -> tuple[int, ...]:
        """Served, ascending."""
        return tuple(sorted(self._needs))

    def serves(self, epoch: int) -> bool:
        """Whether a hop of `epoch` can be computed now. Any thread: `_needs` is replaced, never changed."""
        return epoch in self._needs

    async def run(self) -> None:
        """Follow the document; ends only by cancellation."""
        async for entry in self._registry.kv_watch(placement_key(self._model)):
            if entry is not None:
                await self._take(entry.value)

    async def admit(self, epoch: int, wait_s: float) -> None:
        """Return if the epoch is served; a newer one than known is waited for. Raises StaleEpoch."""
        if epoch in self._needs:
            return
        if not self._needs or epoch > max(self._needs):
            await self._wait_for(epoch, wait_s)
        if epoch not in self._needs:
            raise StaleEpoch(f"shard {self._shard_id} serves epochs {list(self.epochs)}, the hop is of {epoch}")

    async def load(self, epoch: int, experts: Iterable[Expert]) -> None:
        """Take experts for an epoch before its document is there. Raises StaleEpoch, UnknownExpert, CheckpointError."""
        async with self._changing:
            if self._needs and epoch < min(self._needs):
                raise StaleEpoch(f"shard {self._shard_id} serves epochs {list(self.epochs)}, the load is for {epoch}")
            await asyncio.to_thread(self._store.load, list(experts))
            self._serve(epoch, self._needs.get(epoch, frozenset()) | self._store.experts)

    async def unload(self, oldest_epoch: int, experts: Iterable[Expert]) -> None:
        """Serve nothing before `oldest_epoch`, then drop experts. Raises Refused if a served epoch needs one."""
        async with self._changing:
            needs = {epoch: need for epoch, need in self._needs.items() if epoch >= oldest_epoch}
            if not needs:
                raise Refused(f"epoch {oldest_epoch} is newer than any of {list(self.epochs)}", field="oldest_epoch")
            dropped = frozenset(experts)
            needed = dropped & self._always.union(*needs.values())
            if needed:
                raise Refused(f"epochs {sorted(needs)} still need {sorted(needed)[:8]}", field="experts")
            self._needs = needs
            self._store.keep_only(self._store.experts - dropped)

    async def load_always(self) -> None:
        """Take the experts of the settings."""
        async with self._changing:
            await asyncio.to_thread(self._store.load, self._always)

    async def _take(self, document: bytes) -> None:
        try:
            shard_map = ShardMap.from_json(document)
            if (shard_map.model, shard_map.model_revision) != (self._model, self._model_revision):
                seen = f"{shard_map.model} {shard_map.model_revision}"
                raise InvalidPlacement(f"it is for {seen}", field="model_revision")
            if not shard_map.covers(self._store.layout):
                raise InvalidPlacement("it does not cover the model's experts", field="layers")
            await self._change_to(shard_map)
        except (MeshfireError, OSError) as error:  # the epochs that are served stay served
            if isinstance(error, CheckpointError) and not self._needs:
                raise  # nothing to serve and nothing to wait for
            log.error("placement of %s not taken: %s", self._model, error)

    async def _change_to(self, shard_map: ShardMap) -> None:
        async with self._changing:
            if self._needs and shard_map.epoch < max(self._needs):
                return
            need = shard_map.experts_of(self._shard_id)
            if self._needs.get(shard_map.epoch) == need:
                return
            await asyncio.to_thread(self._store.load, need)
            self._serve(shard_map.epoch, need)
            log.info("serving epochs %s with %d experts", list(self.epochs), len(self._store.experts))

    def _serve(self, epoch: int, need: frozenset[Expert]) -> None:
        needs = {**self._needs, epoch: need}
        self._needs = {kept: needs[kept] for kept in sorted(needs)[-RETAINED_EPOCHS:]}
        self._store.keep_only(self._always.union(*self._needs.values()))
        self.placed.set()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for(self, epoch: int, wait_s: float) -> None:
        """Read the document and wait until its epoch, or a newer one, is served; at most `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                entry = await self._registry.kv_get(placement_key(self._model))
                if entry is not None:
                    await self._take(entry.value)
                while not self._needs or epoch > max(self._needs):
                    await self._changed.wait()
        except (TimeoutError, MeshfireError) as error:
            log.warning("epoch %d did not arrive: %r", epoch, error)
