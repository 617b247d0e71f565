"""`meshfire trace`: one request's way through the mesh, as a waterfall."""

from __future__ import annotations

from pathlib import Path

import click

from meshfire.cli.options import console, mesh_option
from meshfire.cluster import state
from meshfire.telemetry.store import find_trace
from meshfire.telemetry.waterfall import render


@click.command()
@click.argument("trace_id", metavar="ID")
@mesh_option
def trace(trace_id: str, mesh: str) -> None:
    """Print the waterfall of a trace; ID may be its first digits, or `last`. Works after the mesh has stopped, too."""
    folder: Path = state.folder_of(mesh) / "traces"
    console().print(render(find_trace(folder, trace_id)))
