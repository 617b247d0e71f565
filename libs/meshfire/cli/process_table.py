"""Processes of a mesh as a table."""

from __future__ import annotations

from rich.table import Table

from meshfire.cluster.state import MeshState

_COLOURS = {"serving": "green", "starting": "yellow", "restarting": "yellow", "unhealthy": "red", "stopped": "dim"}


def process_table(mesh: MeshState) -> Table:
    """One row per process."""
    table = Table(title=f"mesh {mesh.mesh}", title_justify="left", box=None, pad_edge=False)
    for column in ("process", "service", "model", "address", "pid", "health", "restarts"):
        table.add_column(column)
    for one in mesh.processes:
        colour = _COLOURS.get(one.health, "")
        address = f"{one.address}  http://{one.http_address}" if one.http_address else one.address
        health = f"[{colour}]{one.health}[/]" if colour else one.health
        table.add_row(one.name, one.service, one.model, address, str(one.pid or "-"), health, str(one.restarts))
    return table
