"""Keeps the Consul agent of a local mesh running, and its documents in it.

An agent in development mode forgets everything when it ends. Services register again by themselves; the placement
documents are written again here, so that a worker that starts later finds them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from meshfire.discovery.agent import ConsulAgent
from meshfire.errors import Unavailable

log = logging.getLogger(__name__)

PERIOD_S = 1.0


async def keep_agent(agent: ConsulAgent, after_restart: Callable[[], Awaitable[None]]) -> None:
    """Start the agent again whenever it has ended, then call `after_restart`. Runs until it is cancelled."""
    while True:
        await asyncio.sleep(PERIOD_S)
        if agent.pid is not None:
            continue
        log.warning("the Consul agent has ended; starting it again")
        try:
            await agent.start()
            await after_restart()
        except Unavailable as error:
            log.warning("%s; trying again", error)
