"""A Consul agent of one's own on loopback: where its binary is, and the life of one in development mode.

Owns one child process and its ports. For `meshfire up` on one machine and for tests; a cluster brings its own agents.
Knows nothing of what is registered. Flags as in Consul's agent documentation; tried with 1.8.7.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import uuid4

import aiohttp

from meshfire.errors import Unavailable

log = logging.getLogger(__name__)

BINARY_VARIABLE = "MESHFIRE_CONSUL_BIN"
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0
START_ATTEMPTS = 3
_VERSION = re.compile(r"Consul v(\d+)\.(\d+)")


def find_agent() -> Path | None:
    """The binary: `MESHFIRE_CONSUL_BIN`, else `consul` on PATH, else where deploy/consul/fetch-consul.sh puts it."""
    named = os.environ.get(BINARY_VARIABLE)
    if named:
        return Path(named) if os.access(named, os.X_OK) else None
    on_path = shutil.which("consul")
    if on_path:
        return Path(on_path)
    cached = default_binary()
    return cached if os.access(cached, os.X_OK) else None


def default_binary() -> Path:
    """Where a fetched agent belongs: below `MESHFIRE_CACHE_DIR`, else the user's cache folder."""
    cache = os.environ.get("MESHFIRE_CACHE_DIR")
    return (Path(cache) if cache else Path.home() / ".cache" / "meshfire") / "bin" / "consul"


@dataclass(frozen=True)
class AgentPorts:
    """All that an agent binds; DNS and its own gRPC are switched off."""

    http: int
    server: int
    serf_lan: int
    serf_wan: int

    @classmethod
    def free(cls, http: int = 0) -> AgentPorts:
        """Ports that are free for TCP and UDP now; `http` is taken as given if not 0."""
        with ExitStack() as held:
            found = [held.enter_context(_free_port()) for _ in range(4)]
        return cls(http or found[0], *found[1:])


class ConsulAgent:
    """`async with ConsulAgent(binary) as agent:` runs one in memory (`-dev`); `agent.url` is for `open_registry`.

    Started again after a stop it has the same ports and has forgotten everything. Its output goes to `log_file`, or
    nowhere. It lives in a session of its own, so that Ctrl-C in a terminal reaches the mesh first and the agent last.
    """

    def __init__(self, binary: Path, *, ports: AgentPorts | None = None, log_file: Path | None = None) -> None:
        self._binary = binary
        self._fixed = ports is not None
        self._log_file = log_file
        self._process: asyncio.subprocess.Process | None = None
        self._node_id = str(uuid4())
        self.ports = ports or AgentPorts.free()

    @property
    def url(self) -> str:
        return f"consul://127.0.0.1:{self.ports.http}"

    @property
    def http_url(self) -> str:
        """Of its API and its UI page."""
        return f"http://127.0.0.1:{self.ports.http}"

    @property
    def pid(self) -> int | None:
        """Of the running agent."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Run and wait for a leader. Raises Unavailable with what to look at if it does not come up."""
        version = await _version_of(self._binary)
        for attempt in range(START_ATTEMPTS):
            await self._spawn(version)
            try:
                await self._wait_for_leader()
                self._fixed = True  # a restart keeps the address that clients know
                return
            except BaseException as error:
                await self.stop()
                # Someone may have taken a port between the choice and the bind.
                if self._fixed or attempt + 1 == START_ATTEMPTS or not isinstance(error, Unavailable):
                    raise
                self.ports = AgentPorts.free()

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after a few seconds; no error if it is gone."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _spawn(self, version: tuple[int, int]) -> None:
        with ExitStack() as files:
            output = files.enter_context(self._log_file.open("ab")) if self._log_file else asyncio.subprocess.DEVNULL
            self._process = await asyncio.create_subprocess_exec(
                *self._command(version),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )

    def _command(self, version: tuple[int, int]) -> list[str]:
        ports = self.ports
        grpc = "grpc = -1" if version < (1, 14) else "grpc = -1 grpc_tls = -1"
        numbers = f"http = {ports.http} server = {ports.server} serf_lan = {ports.serf_lan} serf_wan = {ports.serf_wan}"
        return [
            str(self._binary),
            "agent",
            "-dev",
            "-node=meshfire",
            f"-node-id={self._node_id}",
            "-bind=127.0.0.1",
            "-client=127.0.0.1",
            "-log-level=warn",
            f"-hcl=ports {{ dns = -1 {grpc} {numbers} }}",
            "-hcl=disable_update_check = true",
        ]

    async def _wait_for_leader(self) -> None:
        process = self._process
        assert process is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as session:
                while not await self._leads(session):
                    if process.returncode is not None:
                        raise Unavailable(f"{self._binary} ended with {process.returncode} at start{self._see_log()}")
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            raise Unavailable(f"{self._binary} has no leader after {START_TIMEOUT_S:.0f} s{self._see_log()}") from error

    async def _leads(self, session: aiohttp.ClientSession) -> bool:
        """Whether there is a leader, and whether the agent that says so is this one and not an older one there."""
        try:
            async with session.get(f"{self.http_url}/v1/status/leader") as answer:
                leader = await answer.json() if answer.status == 200 else ""
            async with session.get(f"{self.http_url}/v1/agent/self") as answer:
                config = (await answer.json())["Config"] if answer.status == 200 else {}
        except aiohttp.ClientError:
            return False
        return bool(leader) and config.get("NodeID") == self._node_id

    def _see_log(self) -> str:
        return f"; see {self._log_file}" if self._log_file else ""


async def _version_of(binary: Path) -> tuple[int, int]:
    """Major and minor, because the newer ones open ports that the older ones do not know how to close."""
    try:
        process = await asyncio.create_subprocess_exec(
            str(binary), "version", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError as error:
        raise Unavailable(f"cannot run {binary}: {error}") from error
    output, _ = await process.communicate()
    found = _VERSION.search(output.decode(errors="replace"))
    if found is None:
        raise Unavailable(f"{binary} version says {output[:80]!r}; expected a Consul agent")
    return int(found[1]), int(found[2])


@contextmanager
def _free_port() -> Iterator[int]:
    """Held until the block ends, so that several asked for together differ."""
    while True:
        with socket.socket() as stream, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
            stream.bind(("127.0.0.1", 0))
            port: int = stream.getsockname()[1]
            try:
                datagrams.bind(("127.0.0.1", port))  # gossip wants both
            except OSError:
                continue
            yield port
            return
