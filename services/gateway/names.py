"""From the name that a caller uses to the name that is served: aliases, and Workers AI's ids of the same model.

Owns the order: an alias, then the name itself, then the id without `@cf/`, then its last part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from meshfire.errors import MeshfireError
from services.gateway.routers import Routers

#: what is served is asked again after so long
_FRESH_S = 2.0


class ModelNames:
    """`aliases`: caller's name → served name."""

    def __init__(self, routers: Routers, aliases: Mapping[str, str], timeout_s: float) -> None:
        self._routers = routers
        self._aliases = dict(aliases)
        self._timeout_s = timeout_s
        self._served: frozenset[str] = frozenset()
        self._asked_s = float("-inf")

    async def resolve(self, name: str) -> str:
        """The served name; the name as it is if nothing fits, for the router to refuse."""
        if name in self._aliases:
            return self._aliases[name]
        candidates = _candidates(name)
        if len(candidates) == 1:
            return name
        served = await self._now_served()
        return next((one for one in candidates if one in served), name)

    async def _now_served(self) -> frozenset[str]:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._asked_s > _FRESH_S:
            try:
                models = await self._routers.list_models(self._timeout_s)
                self._served = frozenset(model.name for model in models)
                self._asked_s = now_s
            except MeshfireError:
                return self._served  # the call itself will say what is missing
        return self._served


def _candidates(name: str) -> Sequence[str]:
    without_host = name.removeprefix("@cf/")
    return list(dict.fromkeys([name, without_host, without_host.rpartition("/")[2]]))
