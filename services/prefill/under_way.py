"""Blocks that prompts are computing right now, so that equal prompts compute their shared blocks once.

Owns who computes which block, by hash, and the waiting for it. Knows neither pool nor tensors. Event loop only.

A prompt announces its blocks once it has memory for all of them, and waits for nobody from then on; a prompt that waits
has announced nothing and holds no block. So every wait ends: with the block, or because its computer gave up, and then
the first of the waiters computes it and the others wait for that one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from services.prefill.prompt import Stop


class UnderWay:
    """All blocks of this worker that are being computed."""

    def __init__(self) -> None:
        self._flights: dict[bytes, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    async def wait(self, hashes: Sequence[bytes], num_ready: Callable[[], int], stop: Stop) -> None:
        """Return as soon as nobody computes the first of `hashes` that is not ready.

        `num_ready()` is the length of the prefix of `hashes` that can be had now; between the last call of it and the
        return nothing else runs. Raises what `stop` says.
        """
        while (ready := num_ready()) < len(hashes):
            flight = self._flights.get(hashes[ready])
            if flight is None:
                return
            await stop.wait(flight.stepped)

    @contextmanager
    def announce(self, hashes: Sequence[bytes]) -> Iterator[Flight]:
        """While the block runs these blocks are being computed; those that another one computes already are left to it.

        However it ends, whoever waits for what was not ready by then looks anew.
        """
        flight = Flight()
        own = [block_hash for block_hash in hashes if self._flights.setdefault(block_hash, flight) is flight]
        try:
            yield flight
        finally:
            for block_hash in own:
                del self._flights[block_hash]
            flight.step()


class Flight:
    """One prompt's computing."""

    def __init__(self) -> None:
        #: resolved at the next step
        self.stepped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def step(self) -> None:
        """More blocks are ready, or no more will be: wake who waits."""
        done, self.stepped = self.stepped, asyncio.get_running_loop().create_future()
        done.set_result(None)
