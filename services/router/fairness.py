"""Deficit round robin as arithmetic: in which round a tenant's next lease is due.

Owns fairness between tenants. Each round gives every waiting tenant `quantum` tokens; a lease is due in the round in
which its tenant's tokens suffice for it and for all before it. So who asks for little is never behind more than a
quantum of anybody else, however much that one asks for (Shreedhar and Varghese, 1996). A tenant that stops waiting
saves nothing up. Knows no leases and no queue.
"""

from __future__ import annotations


class Rounds:
    """Tokens per tenant, counted from round 0."""

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        #: rounds that are over
        self._over = 0
        self._asked: dict[str, int] = {}

    def join(self, tenant: str, num_tokens: int) -> int:
        """The round in which a lease of so many tokens is due, behind its tenant's others."""
        self._asked[tenant] = self._with(tenant, num_tokens)
        return -(-self._asked[tenant] // self._quantum)

    def due(self, tenant: str, num_tokens: int) -> int:
        """As `join` would say."""
        return -(-self._with(tenant, num_tokens) // self._quantum)

    def served(self, round_number: int) -> None:
        """A lease that was due in this round was placed."""
        if round_number > self._over + 1:
            self._over = round_number - 1
            floor = self._over * self._quantum
            self._asked = {tenant: asked for tenant, asked in self._asked.items() if asked > floor}

    def restart(self, tenant: str) -> None:
        """Forget what a tenant asked for: its leases that still wait join anew."""
        self._asked.pop(tenant, None)

    def _with(self, tenant: str, num_tokens: int) -> int:
        return max(self._asked.get(tenant, 0), self._over * self._quantum) + max(1, num_tokens)
