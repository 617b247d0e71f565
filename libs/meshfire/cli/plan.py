"""`meshfire plan` and `meshfire place`: a topology's processes and placement, for Tilt and other starters."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path

import click

from meshfire.cli.options import console, topology_from
from meshfire.cli.pulling import find_or_pull
from meshfire.cluster import place as placing
from meshfire.cluster import ports, state
from meshfire.cluster.plan import ProcessSpec, ResolvedModel, Wiring
from meshfire.cluster.plan import plan as plan_of
from meshfire.cluster.resolve import resolve
from meshfire.cluster.topology import Topology
from meshfire.discovery.base import open_registry
from meshfire.errors import BadInput

topology_option = click.option(
    "--topology", "file", required=True, type=click.Path(path_type=Path, dir_okay=False), help="Topology file (YAML)."
)


@click.command()
@topology_option
def plan(file: Path) -> None:
    """Print the processes of a topology as JSON: command, environment, address, dependencies."""
    topology = topology_from(file, ())
    if not topology.base_port:
        raise BadInput("a plan needs fixed ports: set base_port", field="base_port")
    models = resolve(topology, lambda name: find_or_pull(name, console(stderr=True)))
    store_url = topology.store_url or state.store_url_of(topology.mesh)
    wiring = Wiring(_registry_url(topology), topology.otlp_endpoint, store_url)
    specs = plan_of(topology, models, wiring, ports.counted_from(topology.base_port))
    click.echo(json.dumps([_as_json(one) for one in specs], indent=1))


@click.command()
@topology_option
def place(file: Path) -> None:
    """Write the placement documents of a topology's models to its registry."""
    topology = topology_from(file, ())
    models = resolve(topology, lambda name: find_or_pull(name, console(stderr=True)))
    asyncio.run(_place(topology, models))


async def _place(topology: Topology, models: list[ResolvedModel]) -> None:
    registry = open_registry(_registry_url(topology))
    try:
        await placing.place(topology, models, registry)
    finally:
        await registry.close()


def _registry_url(topology: Topology) -> str:
    if topology.registry == "auto":
        raise BadInput("registry: auto is for `meshfire up` only; name one", field="registry")
    return topology.registry


def _as_json(spec: ProcessSpec) -> dict[str, object]:
    return {**asdict(spec), "command": spec.command}
