"""`meshfire consul`: a development agent in the foreground, for Tilt and for people."""

from __future__ import annotations

import os

import click

from meshfire.discovery.agent import find_agent
from meshfire.errors import NotFound


@click.command()
@click.option("--http-port", default=8500, show_default=True, type=click.IntRange(1, 65535))
def consul(http_port: int) -> None:
    """Run the Consul agent that `meshfire up` would use, in memory, on loopback. Data is gone when it ends."""
    binary = find_agent()
    if binary is None:
        raise NotFound("no Consul agent found: run `make consul`, set MESHFIRE_CONSUL_BIN, or put `consul` on PATH")
    ports = f"ports {{ http = {http_port} dns = -1 grpc = -1 }}"
    flags = ["-dev", "-bind=127.0.0.1", "-client=127.0.0.1", "-log-level=warn", "-hcl=disable_update_check=true"]
    os.execv(binary, [str(binary), "agent", *flags, f"-hcl={ports}"])
