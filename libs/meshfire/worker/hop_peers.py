"""The shards of a model: which placement is in force and a link to each shard it names.

Owns following discovery (placement document, shard instances) and the change from one placement to the next. Does not
know hops: it says which shards are live and what they carry. Event loop only, but for `planner` and `load`, which the
model thread reads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

from meshfire.discovery.base import Instance, Registry
from meshfire.dispatch.plan import ShardPlanner
from meshfire.errors import InvalidPlacement, MeshfireError, ModelMismatch, ShardUnavailable
from meshfire.model.interface import ExpertLayout
from meshfire.placement.shard_map import ShardMap, placement_key
from meshfire.worker.hop_lane import HopLane
from meshfire.worker.hop_link import Caller, Channels, LinkOwner, ShardIdentity, ShardLink

log = logging.getLogger(__name__)

SHARD_SERVICE = "meshfire-expert-shard"
_ADOPT_POLL_S = 0.1
_READ_TIMEOUT_S = 1.0


class ShardPeers:
    """Links and the placement in force. `run()` lives in the owner's TaskGroup."""

    def __init__(
        self,
        identity: ShardIdentity,
        layout: ExpertLayout,
        registry: Registry,
        channels: Channels,
        owner: LinkOwner,
        caller: Caller,
    ) -> None:
        #: None until the first placement is in force
        self.planner: ShardPlanner | None = None
        self._identity = identity
        self._layout = layout
        self._registry = registry
        self._channels = channels
        self._owner = owner
        self._caller = caller
        self._group: asyncio.TaskGroup | None = None
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._links: Mapping[str, ShardLink] = {}  # replaced, never changed: the model thread iterates over it
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._next: ShardMap | None = None
        self._refusal: ModelMismatch | None = None
        self._adopted = asyncio.Event()
        self._moved = asyncio.Event()

    @property
    def links(self) -> Sequence[ShardLink]:
        """All links, also those that only an older or a coming placement needs."""
        return tuple(self._links.values())

    def link(self, shard_id: str) -> ShardLink:
        """The link to one shard. Raises ShardUnavailable if no placement names it."""
        try:
            return self._links[shard_id]
        except KeyError:
            raise ShardUnavailable(f"no placement names shard {shard_id}") from None

    def is_live(self, shard_id: str) -> bool:
        """Whether a shard answers as far as known. Any thread."""
        link = self._links.get(shard_id)
        return link is not None and link.live and not link.stalled

    def load(self) -> dict[str, int]:
        """Rows under way at every live shard. Any thread."""
        live = {shard_id: link for shard_id, link in self._links.items() if link.live and not link.stalled}
        return {shard_id: link.num_rows + _rows_on(link.lane) for shard_id, link in live.items()}

    def lane(self, shard_id: str) -> HopLane | None:
        """The lane to a shard, if hops may take it now. Any thread."""
        link = self._links.get(shard_id)
        lane = link.lane if link is not None and not link.stalled else None
        return None if lane is None or lane.broken else lane

    def notice(self) -> None:
        """A link has changed: perhaps the next placement can come into force now."""
        self._moved.set()

    async def ready(self, patience_s: float) -> None:
        """Wait until a placement is in force. Raises ModelMismatch if the mesh is another's for `patience_s`."""
        refused_since: float | None = None
        while not await _happens(self._adopted, _ADOPT_POLL_S):
            refusal = self._refused()
            if refusal is None:
                refused_since = None
            elif refused_since is None:
                refused_since = time.monotonic()
            elif time.monotonic() - refused_since >= patience_s:
                raise refusal

    async def refresh(self) -> None:
        """Read the placement document now, and let a newer one come into force at once: the old one is not served."""
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                entry = await self._registry.kv_get(placement_key(self._identity.model))
        except (MeshfireError, TimeoutError) as error:
            log.warning("placement of %s not read, the last one stays: %r", self._identity.model, error)
            return
        if entry is not None:
            self._consider(entry.value)
        if self._next is not None:
            self._adopt(self._next)

    async def run(self) -> None:
        """Follow discovery; ends only by cancellation."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._follow_placement(), name="follow-placement")
            group.create_task(self._follow_shards(), name="follow-shards")
            group.create_task(self._change_over(), name="change-placement")

    async def _follow_placement(self) -> None:
        async for entry in self._registry.kv_watch(placement_key(self._identity.model)):
            if entry is not None:
                self._consider(entry.value)

    async def _follow_shards(self) -> None:
        async for instances in self._registry.watch(SHARD_SERVICE):
            self._addresses = _addresses(instances, self._identity.model)
            for shard_id, link in self._links.items():
                link.offer(self._addresses.get(shard_id, ()))

    async def _change_over(self) -> None:
        """Bring the next placement into force once all its shards serve it, or once the old one is broken anyway."""
        while True:
            await _happens(self._moved, _ADOPT_POLL_S)
            self._moved.clear()
            if self._next is None:
                continue
            missing = self._not_serving(self._next)
            if not missing or self._is_broken():
                self._adopt(self._next)
                continue
            for link in missing:
                await self._ask(link)

    async def _ask(self, link: ShardLink) -> None:
        if link.live:
            try:
                await link.describe()
            except MeshfireError as error:
                log.info("shard %s: %s", link.shard_id, error)

    def _consider(self, document: bytes) -> None:
        """Take a document as the next placement if it is newer and this model's."""
        try:
            shard_map = ShardMap.from_json(document)
            self._check(shard_map)
        except (InvalidPlacement, ModelMismatch) as error:
            self._refusal = error if isinstance(error, ModelMismatch) else ModelMismatch(error.message)
            log.error("placement of %s is refused: %s", self._identity.model, error)
            return
        self._refusal = None
        if shard_map.epoch > max(self._epoch, self._next.epoch if self._next else 0):
            self._next = shard_map
            self._link_to(shard_map.shard_ids)
            self._moved.set()

    def _check(self, shard_map: ShardMap) -> None:
        mine = (self._identity.model, self._identity.model_revision)
        if (shard_map.model, shard_map.model_revision) != mine:
            raise ModelMismatch(f"the placement is for {shard_map.model} {shard_map.model_revision}, this is {mine}")
        if not shard_map.covers(self._layout):
            placed = [len(experts) for experts in shard_map.layers]
            raise ModelMismatch(f"the placement has experts {placed} by layer, the model {self._layout.num_experts}")

    @property
    def _epoch(self) -> int:
        return self.planner.shard_map.epoch if self.planner else 0

    def _adopt(self, shard_map: ShardMap) -> None:
        self.planner = ShardPlanner(shard_map)
        self._next = None
        self._adopted.set()
        log.info("placement epoch %d of %s: shards %s", shard_map.epoch, shard_map.model, shard_map.shard_ids)
        self._unlink(set(shard_map.shard_ids))
        self._owner.on_link_change()

    def _link_to(self, shard_ids: Sequence[str]) -> None:
        assert self._group is not None
        links = dict(self._links)
        for shard_id in shard_ids:
            if shard_id not in links:
                link = ShardLink(shard_id, self._identity, self._channels, self._owner, self._caller)
                link.offer(self._addresses.get(shard_id, ()))
                links[shard_id] = link
                self._runs[shard_id] = self._group.create_task(link.run(), name=f"hop-link {shard_id}")
        self._links = links

    def _unlink(self, needed: set[str]) -> None:
        """End links that no placement needs and on which nothing waits; the others get another chance next time."""
        gone = {shard_id for shard_id, link in self._links.items() if shard_id not in needed and not link.waiting}
        self._links = {shard_id: link for shard_id, link in self._links.items() if shard_id not in gone}
        for shard_id in gone:
            self._runs.pop(shard_id).cancel()

    def _not_serving(self, shard_map: ShardMap) -> list[ShardLink]:
        links = [self._links[shard_id] for shard_id in shard_map.shard_ids]
        return [link for link in links if not link.live or shard_map.epoch not in link.epochs]

    def _is_broken(self) -> bool:
        return self.planner is not None and not all(map(self.is_live, self.planner.shard_map.shard_ids))

    def _refused(self) -> ModelMismatch | None:
        refusals = (self._refusal, *(link.refusal for link in self._links.values()))
        return next((refusal for refusal in refusals if refusal is not None), None)


def _addresses(instances: Sequence[Instance], model: str) -> dict[str, tuple[str, ...]]:
    """Addresses by shard id; several processes with one shard id stand in for each other."""
    found: dict[str, tuple[str, ...]] = {}
    for instance in instances:
        shard_id = instance.metadata.get("shard_id", "")
        if shard_id and instance.metadata.get("model") == model:
            found[shard_id] = (*found.get(shard_id, ()), instance.address)
    return found


def _rows_on(lane: HopLane | None) -> int:
    return lane.num_rows if lane is not None else 0


async def _happens(event: asyncio.Event, limit_s: float) -> bool:
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
