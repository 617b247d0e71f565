"""What `meshfire up` leaves in its state folder for `status`, `chat`, `trace` and the like.

<state>/<mesh>/state.json   this file: addresses, process ids, health
<state>/<mesh>/logs/        one file per process
<state>/<mesh>/traces/      recent traces, when no collector is configured
<state>/<mesh>/store.db     accounts, keys and the ledger, unless the topology names another store
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from meshfire.discovery.process import ProcessMark
from meshfire.errors import NotFound


def state_root() -> Path:
    """$MESHFIRE_STATE_DIR, else the XDG state folder."""
    named = os.environ.get("MESHFIRE_STATE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "meshfire"


@dataclass
class ProcessState:
    """One process as the supervisor sees it."""

    name: str
    service: str
    address: str
    model: str = ""
    http_address: str = ""
    pid: int | None = None
    #: starting, serving, unhealthy, restarting, stopped
    health: str = "starting"
    restarts: int = 0


@dataclass
class MeshState:
    """A mesh that is up."""

    mesh: str
    supervisor_pid: int
    registry_url: str
    traces: str
    processes: list[ProcessState] = field(default_factory=list)

    def first(self, service: str) -> ProcessState:
        """A process of a service. Raises NotFound."""
        for one in self.processes:
            if one.service == service:
                return one
        raise NotFound(f"mesh {self.mesh!r} has no {service}")

    def write(self, folder: Path) -> None:
        """Replace the state file; readers see the old or the new one, whole."""
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".state-{os.getpid()}.json"
        temporary.write_text(json.dumps(asdict(self), indent=1))
        temporary.replace(folder / "state.json")


def folder_of(mesh: str) -> Path:
    """State folder of a mesh."""
    return state_root() / mesh


def store_url_of(mesh: str) -> str:
    """The store of a mesh whose topology names none."""
    return f"sqlite:///{folder_of(mesh) / 'store.db'}"


def read(mesh: str) -> MeshState:
    """State of a mesh that is up. Raises NotFound, with what to do, if it is not."""
    found = running(mesh)
    if found is None:
        raise NotFound(f"no mesh {mesh!r} is up here; start one with: meshfire up")
    return found


def running(mesh: str) -> MeshState | None:
    """State of a mesh that is up; None if it is not, or if only its file was left behind."""
    try:
        raw = json.loads((folder_of(mesh) / "state.json").read_text())
    except FileNotFoundError:
        return None
    found = MeshState(**{**raw, "processes": [ProcessState(**one) for one in raw["processes"]]})
    return found if ProcessMark(found.supervisor_pid, started=0).is_alive() else None
