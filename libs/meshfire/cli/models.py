"""`meshfire models`: the model cache."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from rich.table import Table

from meshfire import modelstore
from meshfire.cli.inspecting import inspect
from meshfire.cli.options import console
from meshfire.cli.pulling import pull as pull_with_progress


@click.group()
def models() -> None:
    """Get, list, make and remove models of the cache ($MESHFIRE_CACHE_DIR, else ~/.cache/meshfire)."""


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_models(as_json: bool) -> None:
    """Show the models of the cache."""
    found = modelstore.list_models()
    if as_json:
        click.echo(json.dumps([{**asdict(one), "directory": str(one.directory)} for one in found], indent=1))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "size", "source", "created", "directory"):
        table.add_column(column)
    for one in found:
        size = f"{one.size_bytes / 1e6:.0f} MB" if one.damage is None else f"[red]damaged: {one.damage}[/]"
        table.add_row(one.name, size, one.source, one.created, str(one.directory))
    console().print(table if found else "no models; try: meshfire models pull smollm2-135m-instruct")


@models.command()
@click.argument("spec", metavar="NAME|hf:OWNER/NAME|gguf:PATH")
@click.option("--name", help="What to call it; default: from the source.")
def pull(spec: str, name: str | None) -> None:
    """Get a model. Interrupted, it starts again cleanly; a second pull of the same model waits for the first."""
    click.echo(pull_with_progress(spec, console(stderr=True), name=name))


@models.command()
@click.argument("configuration", metavar="CONFIGURATION")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option("--name", help="What to call it; default: the configuration's name.")
def make(configuration: str, seed: int, name: str | None) -> None:
    """Make a model with seeded random weights: kimi-tiny, kimi-tiny-int4, kimi-tiny-fp8, kimi-bench, llama-tiny."""
    click.echo(modelstore.pull(f"make:{configuration}@{seed}", name=name))


@models.command()
@click.argument("name")
def remove(name: str) -> None:
    """Delete a model from the cache."""
    modelstore.remove(name)


models.add_command(inspect)
