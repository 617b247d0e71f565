"""The option that names a store, for verbs that look into one without a mesh."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import click

from meshfire.cluster import state
from meshfire.store.database import Database

store_option = click.option(
    "--store",
    "store_url",
    envvar="MESHFIRE_STORE_URL",
    help="sqlite:///PATH or postgresql://…; default: the mesh's own.",
)


@asynccontextmanager
async def opened(store_url: str | None, mesh: str) -> AsyncIterator[Database]:
    """The store of that URL, else the one that `meshfire up` gives the mesh. Raises BadInput, StoreUnavailable."""
    database = await Database.open(store_url or state.store_url_of(mesh))
    try:
        yield database
    finally:
        await database.close()
