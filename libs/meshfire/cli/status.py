"""`meshfire status`: what runs, where, and how it is."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

import click

from meshfire.cli.options import console, mesh_option
from meshfire.cli.process_table import process_table
from meshfire.cluster import state
from meshfire.cluster.health import is_serving
from meshfire.cluster.state import MeshState
from meshfire.rpc.channels import ChannelPool


@click.command()
@mesh_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(mesh: str, as_json: bool) -> None:
    """Show the processes of a mesh: addresses, process ids, health. Exit code 1 unless all are healthy."""
    found = state.read(mesh)
    asyncio.run(_ask_all(found))
    if as_json:
        click.echo(json.dumps(asdict(found), indent=1))
    else:
        console().print(process_table(found))
    raise SystemExit(0 if all(one.health == "serving" for one in found.processes) else 1)


async def _ask_all(mesh: MeshState) -> None:
    """Ask every process now: the state file may be a second old."""
    channels = ChannelPool()
    try:
        answers = await asyncio.gather(*(is_serving(channels.get(one.address)) for one in mesh.processes))
    finally:
        await channels.close()
    for one, healthy in zip(mesh.processes, answers):
        if healthy:
            one.health = "serving"
        elif one.health == "serving":
            one.health = "unhealthy"
