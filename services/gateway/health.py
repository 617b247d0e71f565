"""Whether a request could be answered now."""

from __future__ import annotations

from typing import Any

from meshfire.errors import MeshfireError
from services.gateway.routers import Routers


class Health:
    """The gateway is healthy if a router answers and serves a model; it has no state of its own to be ill with."""

    def __init__(self, routers: Routers, timeout_s: float) -> None:
        self._routers = routers
        self._timeout_s = timeout_s

    async def check(self) -> dict[str, Any]:
        """`status` is "ok", or "unavailable" with what is missing."""
        try:
            served = await self._routers.list_models(self._timeout_s)
        except MeshfireError as error:
            return self._report(f"router: {error.message}", [])
        names = [model.name for model in served]
        return self._report("" if names else "model: the router has no model with prefill and decode workers", names)

    def _report(self, missing: str, models: list[str]) -> dict[str, Any]:
        report = {"status": "unavailable" if missing else "ok", "routers": self._routers.num_known, "models": models}
        return report | ({"missing": missing} if missing else {})
