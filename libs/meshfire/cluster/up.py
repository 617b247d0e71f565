"""`meshfire up`: from a topology to a running mesh, and down again."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from meshfire.cluster import ports, state
from meshfire.cluster.agent_keeper import keep_agent
from meshfire.cluster.place import place
from meshfire.cluster.plan import ResolvedModel, Wiring, plan
from meshfire.cluster.supervisor import Supervisor
from meshfire.cluster.topology import Topology
from meshfire.discovery.agent import ConsulAgent, find_agent
from meshfire.discovery.base import open_registry
from meshfire.errors import Refused
from meshfire.telemetry.sink import TraceSink

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Running:
    """A mesh on its way up: `state` changes as processes come and go."""

    state: state.MeshState
    supervisor: Supervisor
    #: one line that says how processes find each other, and why
    discovery: str
    folder: Path


async def up(
    topology: Topology,
    models: Sequence[ResolvedModel],
    stop: asyncio.Event,
    *,
    root: Path,
    on_change: Callable[[Running], None],
) -> None:
    """Run the mesh until `stop` is set. `on_change` is called at every change of a process's state.

    Raises Unavailable when a process does not start or the agent cannot be reached, Refused if the mesh is up already.
    """
    folder = _fresh_folder(topology.mesh)
    async with AsyncExitStack() as stack:
        chosen = await stack.enter_async_context(_discovery(topology.registry, folder))
        otlp = topology.otlp_endpoint or await stack.enter_async_context(_local_sink(folder / "traces"))
        registry = open_registry(chosen.url)
        stack.push_async_callback(registry.close)
        await place(topology, models, registry)
        next_port = ports.counted_from(topology.base_port) if topology.base_port else ports.free_ports()
        store_url = topology.store_url or state.store_url_of(topology.mesh)
        specs = plan(topology, models, Wiring(chosen.url, otlp, store_url), next_port)
        supervisor = Supervisor(specs, root, folder / "logs", lambda: changed())
        mesh = state.MeshState(topology.mesh, os.getpid(), chosen.url, str(folder / "traces"), supervisor.states)
        running = Running(mesh, supervisor, chosen.line, folder)

        def changed() -> None:
            mesh.write(folder)
            on_change(running)

        changed()
        stack.callback((folder / "state.json").unlink, missing_ok=True)
        async with asyncio.TaskGroup() as group:
            keeper = None
            if chosen.agent:
                keeper = group.create_task(
                    keep_agent(chosen.agent, lambda: place(topology, models, registry)), name="keep-consul"
                )
            await supervisor.run(stop)
            if keeper:
                keeper.cancel()


def _fresh_folder(mesh: str) -> Path:
    """The mesh's state folder, with the logs and files of the run before removed and its traces kept.

    Raises Refused if a mesh of that name is up: its files are not ours.
    """
    folder = state.folder_of(mesh)
    if (other := state.running(mesh)) is not None:
        raise Refused(f"mesh {mesh!r} is up already, supervised by process {other.supervisor_pid}; use --mesh NAME")
    for old in ("logs", "registry.json.d", "consul"):
        shutil.rmtree(folder / old, ignore_errors=True)
    (folder / "logs").mkdir(parents=True)
    (folder / "traces").mkdir(exist_ok=True)
    return folder


@dataclass(frozen=True)
class _Discovery:
    url: str
    #: says what was chosen, and why
    line: str
    #: our own, if we started one
    agent: ConsulAgent | None = None


@asynccontextmanager
async def _discovery(wanted: str, folder: Path) -> AsyncIterator[_Discovery]:
    """`auto` starts a Consul agent where one is found, and falls back to files."""
    if wanted != "auto":
        yield _Discovery(wanted, f"discovery: {wanted}")
        return
    binary = find_agent()
    if binary is None:
        line = "discovery: files (no Consul agent found: set MESHFIRE_CONSUL_BIN or put `consul` on PATH)"
        yield _Discovery(f"static:{folder / 'registry.json'}", line)
        return
    async with ConsulAgent(binary, log_file=folder / "logs" / "consul.log") as agent:
        yield _Discovery(agent.url, f"discovery: Consul agent at {agent.http_url} ({binary})", agent)


@asynccontextmanager
async def _local_sink(folder: Path) -> AsyncIterator[str]:
    """Keeps recent traces in `folder`; gives the OTLP endpoint."""
    async with TraceSink(folder) as sink:
        yield sink.endpoint
