"""`meshfire models inspect`: sizes of a model before anything is loaded, as tables or JSON."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import click
from rich.table import Table

from meshfire.cli.options import console
from meshfire.errors import BadInput
from meshfire.modelstore.inspection import Inspection
from meshfire.modelstore.inspection import inspect as inspect_model

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--shards", default=1, show_default=True, type=click.IntRange(1), help="Expert shards.")
@click.option("--memory", multiple=True, metavar="SIZE", help="Memory of a process, such as 80GiB; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(directory: Path, shards: int, memory: tuple[str, ...], as_json: bool) -> None:
    """Tell a model's sizes and what fits where, from config.json and file headers; no weight is read."""
    found = inspect_model(directory, num_shards=shards, memory_bytes=[size_bytes(one) for one in memory])
    if as_json:
        click.echo(json.dumps(asdict(found), indent=1))
        return
    console().print(_sizes(found))
    if found.fits:
        console().print(_fits(found))


def size_bytes(text: str) -> int:
    """80GiB, 512MB, 1000 → bytes. Raises BadInput."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if not match or match[2].upper() not in _UNITS:
        raise BadInput(f"memory is {text!r}, expected a number and one of {', '.join(_UNITS)}".strip(), field="memory")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _sizes(found: Inspection) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    rows = {
        "architecture": f"{found.architecture} (from {found.source})",
        "parameters": f"{found.num_parameters:,}, active per token {found.active_parameters:,}",
        "of which text / vision / projector": (
            f"{found.text_parameters:,} / {found.vision_parameters:,} / {found.projector_parameters:,}"
        ),
        "tensors": f"{found.num_tensors:,}, {_size(found.num_bytes)}",
        **{f"  {dtype}": _size(count) for dtype, count in found.bytes_by_dtype.items()},
        "worker (attention, shared FFNs, head)": _size(found.worker_bytes),
        "experts": f"{found.num_experts:,} x {_size(found.expert_bytes)}",
        f"largest of {found.num_shards} expert shards": _size(found.shard_bytes),
        "KV per token (2 bytes a number)": f"{found.kv_token_bytes:,} bytes",
        "KV of a full context": f"{found.context_tokens:,} tokens, {_size(found.kv_context_bytes)}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _fits(found: Inspection) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("memory", "worker", "KV tokens beside it", "shard", "most experts", "fewest shards"):
        table.add_column(column, justify="right")
    for fit in found.fits:
        worker, shard = ("fits" if yes else "too large" for yes in (fit.worker_fits, fit.shard_fits))
        counts = (f"{fit.max_experts:,}", str(fit.min_shards) if fit.min_shards else "-")
        table.add_row(_size(fit.memory_bytes), worker, f"{fit.kv_tokens:,}", shard, *counts)
    return table


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes} B"
