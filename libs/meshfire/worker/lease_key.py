"""The name of one lease at a worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LeaseKey:
    """Names one lease. A later epoch of the same request is another lease."""

    router_id: str
    request_id: str
    epoch: int

    def cancelled_by(self, router_id: str, request_id: str, epoch: int) -> bool:
        """Whether a cancel of `epoch` ends this one: it ends older ones as well."""
        return (self.router_id, self.request_id) == (router_id, request_id) and self.epoch <= epoch
