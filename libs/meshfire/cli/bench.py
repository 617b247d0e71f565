"""`meshfire bench`: runs a benchmark of the checkout."""

from __future__ import annotations

import subprocess
import sys

import click

from meshfire.cli.options import repository_root
from meshfire.errors import NotFound


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("name", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(name: str | None, arguments: tuple[str, ...]) -> None:
    """Run a benchmark by NAME; without one, list them. The last line of its output is one JSON object."""
    root = repository_root()
    folder = root / "tests" / "bench"
    known = sorted(one.stem.replace("_", "-") for one in folder.glob("*.py") if not one.stem.startswith("_"))
    if name is None:
        click.echo("\n".join(known))
        return
    if name not in known:
        raise NotFound(f"no benchmark {name!r}; there are: {', '.join(known)}")
    module = f"tests.bench.{name.replace('-', '_')}"
    raise SystemExit(subprocess.run([sys.executable, "-m", module, *arguments], cwd=root, check=False).returncode)
