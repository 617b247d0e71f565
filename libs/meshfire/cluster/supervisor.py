"""Starts processes, keeps them running, tells their health, stops them in order.

A process that ends is started again at once, then with growing pauses; one that was healthy and does not answer any
more (frozen, deadlocked) is killed, and so started again. One that ends again and again before it was ever healthy ends
the mesh with the tail of its log: a wrong setting should be read, not retried for ever.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from meshfire.cluster.health import is_serving
from meshfire.cluster.plan import STOP_ORDER, ProcessSpec
from meshfire.cluster.state import ProcessState
from meshfire.errors import Unavailable
from meshfire.rpc.channels import ChannelPool

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 4
FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 5.0
STOP_GRACE_S = 25.0
#: a process that was healthy is killed after this time without a healthy answer
FROZEN_S = 15.0


class Supervisor:
    """Owns the processes of one mesh. `on_change` is called after every change of `states`."""

    def __init__(
        self, specs: Sequence[ProcessSpec], root: Path, log_folder: Path, on_change: Callable[[], None]
    ) -> None:
        self._keepers = [_Keeper(spec, root, log_folder, on_change) for spec in specs]

    @property
    def states(self) -> list[ProcessState]:
        """Processes in the order of the plan."""
        return [one.state for one in self._keepers]

    @property
    def all_serving(self) -> bool:
        """True if every process is healthy."""
        return all(one.health == "serving" for one in self.states)

    async def run(self, stop: asyncio.Event) -> None:
        """Keep all processes up until `stop` is set, then stop them in order. Raises Unavailable for a crash loop."""
        channels = ChannelPool()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one.keep_up(), name=f"keep-{one.spec.name}") for one in self._keepers]
                tasks += [
                    group.create_task(one.watch_health(channels), name=f"health-{one.spec.name}")
                    for one in self._keepers
                ]
                await stop.wait()
                await self._stop_in_order()
                for task in tasks:
                    task.cancel()
        finally:
            await asyncio.shield(self._stop_in_order())
            await channels.close()

    async def _stop_in_order(self) -> None:
        for service in STOP_ORDER:
            await asyncio.gather(*(one.stop() for one in self._keepers if one.spec.service == service))


class _Keeper:
    """One process."""

    def __init__(self, spec: ProcessSpec, root: Path, log_folder: Path, on_change: Callable[[], None]) -> None:
        self.spec = spec
        self.state = ProcessState(spec.name, spec.service, spec.address, spec.model, spec.http_address)
        self._root = root
        self._log = log_folder / f"{spec.name}.log"
        self._on_change = on_change
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._was_healthy = False

    async def keep_up(self) -> None:
        failed_starts, pause_s = 0, FIRST_PAUSE_S
        while not self._stopping:
            self._was_healthy = False
            code = await self._run_once()
            if self._stopping:
                return
            log.warning("%s ended with %s; starting it again", self.spec.name, _outcome(code))
            failed_starts = 0 if self._was_healthy else failed_starts + 1
            if failed_starts >= MAX_FAILED_STARTS:
                raise Unavailable(f"{self.spec.name} does not start ({_outcome(code)}); its log says:\n{self._tail()}")
            pause_s = FIRST_PAUSE_S if self._was_healthy else min(pause_s * 2, LAST_PAUSE_S)
            await asyncio.sleep(pause_s)
            self.state.restarts += 1

    async def _run_once(self) -> int:
        with self._log.open("ab") as sink:
            self._process = await self._spawn(sink)
        self._change(pid=self._process.pid, health="starting")
        code = await self._process.wait()
        self._process = None
        self._change(pid=None, health="stopped" if self._stopping else "restarting")
        return code

    async def _spawn(self, sink: IO[bytes]) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self.spec.command,
            cwd=self._root,
            env={**os.environ, **self.spec.env, self.spec.prefix + "PARENT_PID": str(os.getpid())},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,  # Ctrl-C goes to the supervisor alone, which drains in order
        )

    async def watch_health(self, channels: ChannelPool) -> None:
        last_healthy = time.monotonic()
        while True:
            await asyncio.sleep(0.25 if self.state.health != "serving" else 1.0)
            process = self._process
            healthy = process is not None and await is_serving(channels.get(self.spec.address))
            if process is None or process is not self._process or self._stopping:
                continue
            if healthy or not self._was_healthy:
                last_healthy = time.monotonic()
            self._was_healthy |= healthy
            self._change(health=_health(healthy, self._was_healthy))
            if time.monotonic() - last_healthy > FROZEN_S:
                log.warning("%s does not answer any more; killed", self.spec.name)
                process.kill()

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after the grace. Idempotent."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                await process.wait()
        except TimeoutError:
            log.warning("%s did not stop within %.0f s; killed", self.spec.name, STOP_GRACE_S)
            process.kill()
            await process.wait()

    def _change(self, **values: object) -> None:
        before = vars(self.state).copy()
        for name, value in values.items():
            setattr(self.state, name, value)
        if vars(self.state) != before:
            self._on_change()

    def _tail(self, num_lines: int = 15) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])


def _health(healthy: bool, was_healthy: bool) -> str:
    if healthy:
        return "serving"
    return "unhealthy" if was_healthy else "starting"


def _outcome(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
