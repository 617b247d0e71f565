"""A private PostgreSQL server for tests: own folder, free port on loopback, gone at the end."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType


def find_postgres() -> Path | None:
    """Folder of `initdb` and `pg_ctl`, as Debian installs it, or on PATH."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if installed:
        return installed[-1]
    found = shutil.which("initdb")
    return Path(found).parent if found else None


class PostgresServer:
    """Runs while the block runs. As root it runs as `postgres`: the server refuses root."""

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        self._as = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        self._numbers = itertools.count()
        self._port = _free_port()
        #: not pytest's own folder: its parents are closed to other users
        self._folder = Path(tempfile.mkdtemp(prefix="meshfire-postgres-"))

    def __enter__(self) -> PostgresServer:
        if self._as:
            shutil.chown(self._folder, "postgres")
        data = str(self._folder / "data")
        self._run("initdb", "-D", data, "-A", "trust", "-U", "postgres", "--no-sync")
        options = f"-k {self._folder} -c listen_addresses=127.0.0.1 -p {self._port}"
        self._run("pg_ctl", "-D", data, "-l", str(self._folder / "log"), "-w", "-o", options, "start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run("pg_ctl", "-D", str(self._folder / "data"), "-m", "immediate", "-w", "stop")
        shutil.rmtree(self._folder)

    def new_database(self) -> str:
        """URL of an empty database."""
        name = f"test_{next(self._numbers)}"
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self._port), "-U", "postgres", name)
        return f"postgresql://postgres@127.0.0.1:{self._port}/{name}"

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._as, str(self._binaries / program), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=self._folder, timeout=50)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
