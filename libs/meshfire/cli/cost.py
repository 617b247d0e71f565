"""`meshfire cost`: what a workload costs on one model and on others."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.table import Table

from meshfire.cli.options import console
from meshfire.metering.comparison import Workload, compare
from meshfire.metering.prices import PriceTable


def _count(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Whole numbers, also written 1e6 or 1_000_000."""
    try:
        number = float(value.replace(",", "").replace("_", ""))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no number") from None
    if not number.is_integer() or number < 0:
        raise click.BadParameter(f"{value} is no whole number of at least 0")
    return int(number)


@click.command()
@click.option("--requests", callback=_count, default="1e6", show_default=True, help="Requests.")
@click.option("--input", "input_tokens", callback=_count, required=True, help="Prompt tokens of each.")
@click.option("--cached", type=click.FloatRange(0, 1), default=0.0, show_default=True, help="Share found in caches.")
@click.option("--output", "output_tokens", callback=_count, required=True, help="Output tokens of each.")
@click.option("--model", "models", multiple=True, help="Model to price; repeat it. Default: every model with a price.")
@click.option("--prices", type=click.Path(path_type=Path), help="YAML file with prices of own models.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def cost(
    requests: int,
    input_tokens: int,
    cached: float,
    output_tokens: int,
    models: tuple[str, ...],
    prices: Path | None,
    as_json: bool,
) -> None:
    """Compare prices: the model asked for first, then every other from cheap to dear."""
    table = PriceTable.from_file(prices)
    workload = Workload(requests, input_tokens, cached, output_tokens)
    asked = compare(workload, models, table)
    priced = {table.full_name(one) for one in models}
    others = compare(workload, [name for name in table.names() if name not in priced], table)
    rows = asked + sorted(others, key=lambda one: one.dollars)
    if as_json:
        click.echo(json.dumps([asdict(one) for one in rows], indent=1))
        return
    shown = Table(box=None, pad_edge=False)
    shown.add_column("model")
    for column in ("neurons", "$", "$ without cache", "× first"):
        shown.add_column(column, justify="right")
    for row in rows:
        ratio = f"{row.dollars / rows[0].dollars:.2f}" if rows[0].dollars else "-"
        cells = (f"{row.neurons:,.0f}", f"{row.dollars:,.2f}", f"{row.uncached_dollars:,.2f}", ratio)
        shown.add_row(row.model, *cells, style="bold" if row in asked else "")
    console().print(shown)
