"""`meshfire keys`: accounts and their API tokens."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from datetime import UTC, datetime

import click
from rich.table import Table

from meshfire.cli.options import console, mesh_option
from meshfire.cli.store_option import opened, store_option
from meshfire.errors import BadInput, NotFound
from meshfire.store.accounts import Account, Accounts, ApiKey, Plan


@click.group()
def keys() -> None:
    """Make, list and revoke API tokens. A mesh asks for them when it is started with `meshfire up --keys`."""


@keys.command()
@click.argument("name")
@click.option("--account", help="Id or name of the account; a name that is new makes one. Default: the key's name.")
@click.option("--plan", type=click.Choice([one.value for one in Plan]), help="Of a new account; default: free.")
@click.option("--rpm", type=click.IntRange(0), help="Requests per minute of a new account.")
@click.option("--concurrent", type=click.IntRange(0), help="Requests at once of a new account.")
@store_option
@mesh_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def create(
    name: str,
    account: str | None,
    plan: str | None,
    rpm: int | None,
    concurrent: int | None,
    store_url: str | None,
    mesh: str,
    as_json: bool,
) -> None:
    """Make a token called NAME and print it: it cannot be shown again."""

    async def make() -> tuple[Account, ApiKey, str]:
        async with opened(store_url, mesh) as database:
            accounts = Accounts(database)
            owner = await _find(accounts, account or name)
            if owner is None:
                wanted = Plan(plan or Plan.FREE.value)
                owner = await accounts.create_account(
                    account or name, wanted, requests_per_minute=rpm, max_concurrent=concurrent
                )
            elif (plan, rpm, concurrent) != (None, None, None):
                raise BadInput(f"account {owner.name!r} exists: its plan and limits stay as they are", field="account")
            return owner, *(await accounts.create_key(owner.account_id, name))

    owner, key, token = asyncio.run(make())
    if as_json:
        click.echo(json.dumps({"account_id": owner.account_id, "key_id": key.key_id, "token": token}))
        return
    click.echo(f"account  {owner.account_id}  {owner.name} ({owner.plan.value})")
    click.echo(f"key      {key.key_id}  {key.name}")
    click.echo(f"token    {token}   (shown only now)")


@keys.command("list")
@store_option
@mesh_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_keys(store_url: str | None, mesh: str, as_json: bool) -> None:
    """Show all keys."""

    async def read() -> tuple[list[Account], list[ApiKey]]:
        async with opened(store_url, mesh) as database:
            accounts = Accounts(database)
            return await accounts.list_accounts(), await accounts.list_keys()

    owners, found = asyncio.run(read())
    if as_json:
        click.echo(json.dumps([asdict(one) for one in found], indent=1))
        return
    names = {one.account_id: one for one in owners}
    table = Table(box=None, pad_edge=False)
    for column in ("key", "name", "token", "account", "plan", "created", "state"):
        table.add_column(column)
    for one in found:
        owner = names[one.account_id]
        state = "active" if one.revoked_at_ms is None else f"revoked {_date(one.revoked_at_ms)}"
        table.add_row(
            one.key_id, one.name, f"{one.hint}…", owner.name, owner.plan.value, _date(one.created_at_ms), state
        )
    console().print(table if found else "no keys; make one with: meshfire keys create NAME")


@keys.command()
@click.argument("key_id", metavar="KEY")
@store_option
@mesh_option
def revoke(key_id: str, store_url: str | None, mesh: str) -> None:
    """Make a key worthless, from the next request on."""

    async def end() -> None:
        async with opened(store_url, mesh) as database:
            await Accounts(database).revoke_key(key_id)

    asyncio.run(end())


async def _find(accounts: Accounts, wanted: str) -> Account | None:
    try:
        return await accounts.account(wanted)
    except NotFound:
        named = [one for one in await accounts.list_accounts() if one.name == wanted]
    if len(named) > 1:
        raise BadInput(f"{len(named)} accounts are called {wanted!r}: name one by its id", field="account")
    return named[0] if named else None


def _date(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")
