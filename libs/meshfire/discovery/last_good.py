"""What to believe of an agent that has just come back. Pure; knows no agent and no clock.

A restarted agent answers at once and has forgotten everything: believed, its empty list would empty the whole mesh in
the seconds until the services have registered again. So for a grace period after trouble an instance that was known
good and is now missing stands; a document that was known and is now missing stands until it is written again, because
the mesh never deletes documents.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshfire.discovery.base import Instance, KvEntry

Instances = tuple[Instance, ...]


class LastGoodInstances:
    """The list to show for one service. Times are of one monotonic clock, in seconds."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._good: dict[str, Instance] = {}
        self._recovers_until_s: float | None = None

    def trouble(self) -> None:
        """The agent did not answer, or went back in time: the grace period starts with the next answer."""
        self._recovers_until_s = float("inf")

    def answered(self, instances: Sequence[Instance], now_s: float) -> Instances:
        """What to show after this answer, ordered by id."""
        if self._recovers_until_s == float("inf"):
            self._recovers_until_s = now_s + self._grace_s
        fresh = {one.instance_id: one for one in instances}
        if not self.is_recovering(now_s) or self._good.keys() <= fresh.keys():
            self._recovers_until_s = None
            self._good = fresh
        else:
            self._good = self._good | fresh
        return tuple(self._good[key] for key in sorted(self._good))

    def patience_s(self, now_s: float, most_s: float) -> float:
        """How long the next question may block: not past the end of the grace period."""
        if self._recovers_until_s is None:
            return most_s
        return max(0.0, min(most_s, self._recovers_until_s - now_s))

    def is_recovering(self, now_s: float) -> bool:
        """Whether missing instances are still given time."""
        return self._recovers_until_s is not None and now_s < self._recovers_until_s


class LastGoodDocument:
    """The entry to show for one key."""

    def __init__(self) -> None:
        self._good: KvEntry | None = None
        self._troubled = False

    def trouble(self) -> None:
        self._troubled = True

    def patience_s(self, now_s: float, most_s: float) -> float:
        """A document is never given up, so no deadline cuts the question short."""
        return most_s

    def answered(self, entry: KvEntry | None, now_s: float) -> KvEntry | None:
        """A missing document that was known before the trouble stands; without trouble, missing is missing."""
        if entry is None and self._troubled:
            return self._good
        self._troubled = False
        self._good = entry
        return entry
