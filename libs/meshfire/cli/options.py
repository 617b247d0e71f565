"""Options that several verbs share, and what they resolve to."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

import meshfire
from meshfire.cluster import topology as topologies
from meshfire.cluster.topology import Topology
from meshfire.errors import NotFound

#: columns where there is no terminal to ask
WIDTH_WITHOUT_TERMINAL = 160

DEFAULT_MODEL = "smollm2-135m-instruct"

mesh_option = click.option("--mesh", default="local", show_default=True, help="Name of the mesh.")


def console(*, stderr: bool = False) -> Console:
    """A terminal's own width; a fixed, wide one for pipes and files."""
    own = Console(stderr=stderr)
    return own if own.is_terminal else Console(stderr=stderr, width=WIDTH_WITHOUT_TERMINAL)


def repository_root() -> Path:
    """Where `services/` is: the checkout that this package is installed from, else the working directory.

    Raises NotFound: services are run from a checkout, they are no part of the installed package.
    """
    for root in (Path(meshfire.__file__).resolve().parents[2], Path.cwd()):
        if (root / "services" / "__init__.py").is_file():
            return root
    raise NotFound("no services/ folder here: run this in a checkout of Meshfire")


def topology_from(
    file: Path | None,
    models: tuple[str, ...],
    *,
    http_port: int | None = None,
    test_hooks: bool = False,
    each_model: dict[str, int | str | None] | None = None,
    mesh: str | None = None,
    registry: str | None = None,
    keys: bool = False,
) -> Topology:
    """The topology of a file with the command line's values over it. Raises BadInput."""
    raw = topologies.load(file).model_dump() if file else {"models": []}
    if models:
        raw["models"] = [{"model": one} for one in models]
    if not raw["models"]:
        raw["models"] = [{"model": DEFAULT_MODEL}]
    for model in raw["models"]:
        model.update({key: value for key, value in (each_model or {}).items() if value is not None})
    overrides = {
        "http_port": http_port,
        "mesh": mesh,
        "registry": registry,
        "keys": keys or None,
        "test_hooks": test_hooks or None,
    }
    raw.update({key: value for key, value in overrides.items() if value is not None})
    return topologies.parse(raw, source=str(file or "command line"))
