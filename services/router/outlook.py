"""What a newcomer can expect, and whether that is good enough.

Owns the refusal of work whose deadline cannot be met, and of work that would rather not wait. What the queue looks like
is the desk's to tell.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshfire.errors import OutOfCapacity
from services.router.tickets import Priority

_SHORTEST_S = 1.0
_LONGEST_S = 60.0


@dataclass(frozen=True)
class Newcomer:
    """A request at the door. `deadline_s` is of the router's clock."""

    model: str
    priority: Priority
    tenant: str
    num_tokens: int
    deadline_s: float
    #: refuse at once what would have to wait
    never_waits: bool = False


@dataclass(frozen=True)
class Outlook:
    """`position` 0 = no wait; `service_s` from its placement to its end, as far as anything is known."""

    position: int
    wait_s: float
    service_s: float

    def check(self, newcomer: Newcomer, now_s: float) -> None:
        """Raise OutOfCapacity for work that would end too late for having waited, or that must not wait."""
        if self.position == 0:
            return
        if newcomer.never_waits:
            raise self._refusal("capacity is exceeded now, and the request is not to wait", 0.0)
        left_s = newcomer.deadline_s - now_s
        needed_s = self.wait_s + self.service_s
        # Asynchronous work has days; a forecast of minutes says nothing about it.
        if newcomer.priority is Priority.ONLINE and needed_s > left_s:
            what = (
                f"about {needed_s:.1f} s would be needed, {self.wait_s:.1f} s of them waiting; {left_s:.1f} s are left"
            )
            raise self._refusal(f"the deadline cannot be met: {what}", left_s - self.service_s)

    def retry_after_s(self, bearable_s: float) -> float:
        """When a request that can wait for `bearable_s` would be let in, 1 to 60 s."""
        return min(_LONGEST_S, max(_SHORTEST_S, self.wait_s - max(0.0, bearable_s)))

    def _refusal(self, message: str, bearable_s: float) -> OutOfCapacity:
        metadata = {"queue_position": str(self.position), "predicted_wait_ms": str(round(1000 * self.wait_s))}
        return OutOfCapacity(message, retry_after_s=self.retry_after_s(bearable_s), metadata=metadata)


NO_WAIT = Outlook(0, 0.0, 0.0)
