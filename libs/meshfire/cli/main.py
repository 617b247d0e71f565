"""`meshfire`: the command line of a local mesh."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import Any

import click

from meshfire import __version__
from meshfire.errors import MeshfireError

#: verb → module:attribute; imported only when used, so that `meshfire status` does not wait for torch
VERBS = {
    "bench": "meshfire.cli.bench:bench",
    "chat": "meshfire.cli.chat:chat",
    "consul": "meshfire.cli.consul:consul",
    "cost": "meshfire.cli.cost:cost",
    "health": "meshfire.cli.health:health",
    "keys": "meshfire.cli.keys:keys",
    "models": "meshfire.cli.models:models",
    "place": "meshfire.cli.plan:place",
    "plan": "meshfire.cli.plan:plan",
    "status": "meshfire.cli.status:status",
    "trace": "meshfire.cli.trace:trace",
    "up": "meshfire.cli.up:up",
    "usage": "meshfire.cli.usage:usage",
    "viewer": "meshfire.cli.viewer:viewer",
}


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, _, attribute = VERBS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
@click.option("-v", "--verbose", is_flag=True, help="Log to stderr.")
def cli(verbose: bool) -> None:
    """A self-hosted Workers AI for large open models."""
    logging.basicConfig(
        level="INFO" if verbose else "WARNING", format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def main(args: list[str] | None = None) -> None:
    """Entry point. Errors that are part of the design print one line and exit with 1, bad usage with 2."""
    try:
        cli.main(args=args, standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (MeshfireError, ExceptionGroup) as error:
        for one in _known(error):
            click.echo(f"meshfire: {one}", err=True)
        sys.exit(1)


def _known(error: BaseException) -> list[MeshfireError]:
    if isinstance(error, MeshfireError):
        return [error]
    if isinstance(error, BaseExceptionGroup):
        found: list[Any] = [one for inner in error.exceptions for one in _known(inner)]
        return found
    raise error
