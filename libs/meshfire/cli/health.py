"""`meshfire health`: one process's health as an exit code, for readiness probes."""

from __future__ import annotations

import asyncio

import click

from meshfire.cluster.health import is_serving
from meshfire.rpc.channels import ChannelPool


@click.command()
@click.argument("address", metavar="HOST:PORT")
@click.option("--timeout", "timeout_s", default=1.0, show_default=True, help="Seconds.")
def health(address: str, timeout_s: float) -> None:
    """Exit with 0 if the process at HOST:PORT is SERVING (grpc.health.v1), else with 1."""
    raise SystemExit(0 if asyncio.run(_ask(address, timeout_s)) else 1)


async def _ask(address: str, timeout_s: float) -> bool:
    channels = ChannelPool()
    try:
        return await is_serving(channels.get(address), timeout_s=timeout_s)
    finally:
        await channels.close()
