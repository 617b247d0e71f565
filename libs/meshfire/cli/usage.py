"""`meshfire usage`: what was used, by day, model and key."""

from __future__ import annotations

import asyncio
import json

import click
from rich.table import Table

from meshfire.cli.options import console, mesh_option
from meshfire.cli.store_option import opened, store_option
from meshfire.metering.neurons import dollars, neurons
from meshfire.store.accounts import Accounts
from meshfire.store.ledger import GroupBy, Ledger, Sum

_DAY = click.DateTime(["%Y-%m-%d"])


@click.command()
@click.option(
    "--by",
    type=click.Choice([one.value for one in GroupBy]),
    multiple=True,
    default=("day", "model", "key"),
    show_default=True,
    help="Columns to add up by; repeat it.",
)
@click.option("--account", "account_id", help="Id of one account.")
@click.option("--since", type=_DAY, help="First day (UTC).")
@click.option("--until", type=_DAY, help="Last day (UTC).")
@store_option
@mesh_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def usage(
    by: tuple[str, ...],
    account_id: str | None,
    since: object,
    until: object,
    store_url: str | None,
    mesh: str,
    as_json: bool,
) -> None:
    """Show requests, tokens, neurons and dollars."""
    groups = [GroupBy(one) for one in by]

    async def read() -> tuple[list[Sum], dict[str, str]]:
        async with opened(store_url, mesh) as database:
            sums = await Ledger(database).sums(
                groups, account_id=account_id, first_day=_day(since), last_day=_day(until)
            )
            accounts = Accounts(database)
            names = {one.key_id: one.name for one in await accounts.list_keys()}
            return sums, names | {one.account_id: one.name for one in await accounts.list_accounts()}

    sums, names = asyncio.run(read())
    if as_json:
        click.echo(json.dumps([_row(by, one) for one in sums], indent=1))
        return
    table = Table(box=None, pad_edge=False)
    for column in by:
        table.add_column(column)
    for column in ("requests", "input", "cached", "output", "reasoning", "neurons", "$"):
        table.add_column(column, justify="right")
    for one in sums:
        tokens = one.tokens
        counts = (one.num_requests, tokens.prompt, tokens.cached, tokens.output, one.reasoning_tokens)
        money = (f"{neurons(one.micro_neurons):,.2f}", f"{dollars(one.micro_neurons):,.4f}")
        group = [names.get(value, value) or "-" for value in one.group]
        table.add_row(*group, *(f"{count:,}" for count in counts), *money)
    console().print(table if sums else "nothing was used")


def _row(by: tuple[str, ...], one: Sum) -> dict[str, object]:
    return dict(zip(by, one.group, strict=True)) | {
        "requests": one.num_requests,
        "input_tokens": one.tokens.prompt,
        "cached_tokens": one.tokens.cached,
        "output_tokens": one.tokens.output,
        "reasoning_tokens": one.reasoning_tokens,
        "neurons": neurons(one.micro_neurons),
        "dollars": dollars(one.micro_neurons),
    }


def _day(value: object) -> str | None:
    return None if value is None else f"{value:%Y-%m-%d}"
