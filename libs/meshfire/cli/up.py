"""`meshfire up`: start a mesh, show it coming up, keep it until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import get_args

import click
from rich.console import Console
from rich.live import Live

from meshfire.cli.options import console, repository_root, topology_from
from meshfire.cli.process_table import process_table
from meshfire.cli.pulling import find_or_pull
from meshfire.cluster.plan import ResolvedModel
from meshfire.cluster.resolve import resolve
from meshfire.cluster.topology import Topology
from meshfire.cluster.up import Running
from meshfire.cluster.up import up as run_mesh
from meshfire.model.compute.names import ComputeName


@click.command()
@click.option("--topology", type=click.Path(path_type=Path, dir_okay=False), help="Topology file (YAML).")
@click.option("--model", "models", multiple=True, metavar="NAME|DIR", help="Model to serve; may be repeated.")
@click.option("--prefill", type=click.IntRange(0, 64), help="Prefill workers of each model; 0 = decode workers do it.")
@click.option("--decode", type=click.IntRange(1, 64), help="Decode workers of each model.")
@click.option("--expert-shards", type=click.IntRange(0, 64), help="Expert shards of each model.")
@click.option("--dense-slices", type=click.IntRange(0, 64), help="Slices of each dense FFN, served by the shards.")
@click.option("--compute", type=click.Choice(get_args(ComputeName)), help="How workers compute; default auto.")
@click.option("--num-threads", type=click.IntRange(1), help="Threads of each worker's arithmetic.")
@click.option("--http-port", type=click.IntRange(0, 65535), help="Port of the REST API; 0 = a free one.")
@click.option("--registry", help="auto, consul://HOST:PORT or static:/path/file.json.")
@click.option("--mesh", help="Name of the mesh.")
@click.option("--keys", is_flag=True, help="Ask for API tokens; make them with `meshfire keys create`.")
@click.option("--test-hooks", is_flag=True, help="Accept script and fault headers. Never in production.")
def up(
    topology: Path | None,
    models: tuple[str, ...],
    prefill: int | None,
    decode: int | None,
    expert_shards: int | None,
    dense_slices: int | None,
    compute: str | None,
    num_threads: int | None,
    http_port: int | None,
    registry: str | None,
    mesh: str | None,
    keys: bool,
    test_hooks: bool,
) -> None:
    """Start and supervise a whole mesh on this machine."""
    each_model = {
        "prefill": prefill,
        "decode": decode,
        "expert_shards": expert_shards,
        "dense_slices": dense_slices,
        "compute": compute,
        "num_threads": num_threads,
    }
    wanted = topology_from(
        topology,
        models,
        http_port=http_port,
        test_hooks=test_hooks,
        each_model=each_model,
        mesh=mesh,
        registry=registry,
        keys=keys,
    )
    terminal = console()
    root = repository_root()
    resolved = resolve(wanted, lambda name: find_or_pull(name, terminal))
    asyncio.run(_run(wanted, resolved, root, terminal))


async def _run(topology: Topology, models: list[ResolvedModel], root: Path, terminal: Console) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for one in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(one, stop.set)
    display = _Display(terminal)
    with display:
        await run_mesh(topology, models, stop, root=root, on_change=display.show)
    terminal.print("stopped")


class _Display:
    """A live table in a terminal; plain lines elsewhere."""

    def __init__(self, terminal: Console) -> None:
        self._terminal = terminal
        self._live = Live(console=terminal, auto_refresh=False) if terminal.is_terminal else None
        self._seen: dict[str, str] = {}
        self._announced = False

    def __enter__(self) -> None:
        if self._live:
            self._live.start()

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, mesh: Running) -> None:
        if not self._seen:
            self._print(mesh.discovery)
        self._lines(mesh)
        if self._live:
            self._live.update(process_table(mesh.state), refresh=True)
        if mesh.supervisor.all_serving and not self._announced:
            self._announced = True
            self._announce(mesh)

    def _lines(self, mesh: Running) -> None:
        for one in mesh.state.processes:
            if self._seen.get(one.name) != one.health:
                self._seen[one.name] = one.health
                if not self._live:
                    self._print(f"{one.name:<14} {one.health:<10} {one.address}  pid {one.pid or '-'}")

    def _announce(self, mesh: Running) -> None:
        gateway, router = mesh.state.first("gateway"), mesh.state.first("router")
        self._print(f"REST   http://{gateway.http_address}/v1")
        self._print(f"gRPC   {router.address}")
        self._print(f"logs   {mesh.folder / 'logs'}")
        self._print('ready: try  meshfire chat "What is the capital of France?"   (Ctrl-C stops)')

    def _print(self, line: str) -> None:
        self._terminal.print(line, highlight=False, soft_wrap=True)
