"""`meshfire up` as a child process, for tests and benchmarks: start, look, kill parts, stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshfire.errors import MeshfireError
from meshfire.modelstore import resolve

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
START_TIMEOUT_S = 120.0
#: environments of a mesh whose hops all take one way to their shards, by name
HOP_TRANSPORTS = {
    transport: {f"MESHFIRE_{role}_HOP_TRANSPORT": transport for role in ("PREFILL", "DECODE")}
    for transport in ("grpc", "local")
}


def cached_model(name: str) -> Path:
    """Directory of a model that `make model` has pulled; skips the test where it could not be had."""
    try:
        return resolve(name)
    except MeshfireError as error:
        pytest.skip(f"{name} is not in the model cache (make model): {error}")


@dataclass
class MeshProcess:
    """A mesh that is up."""

    process: subprocess.Popen[bytes]
    env: Mapping[str, str]
    name: str
    output: Path

    def status(self) -> dict[str, Any]:
        """What the supervisor writes of its mesh (at most a health check's period old)."""
        try:
            return dict(json.loads((self.folder / "state.json").read_text()))
        except FileNotFoundError:
            return {"processes": []}

    @property
    def folder(self) -> Path:
        """The mesh's state folder."""
        return Path(self.env["MESHFIRE_STATE_DIR"]) / self.name

    def cli(
        self, *arguments: str, check: bool = True, timeout_s: float = 60, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a `meshfire` verb against this mesh."""
        command = [str(BIN / "meshfire"), arguments[0], "--mesh", self.name, *arguments[1:]]
        done = subprocess.run(
            command, env=self.env, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done

    def process_of(self, name: str) -> dict[str, Any]:
        return next(one for one in self.status()["processes"] if one["name"] == name)

    @property
    def http_url(self) -> str:
        return f"http://{self.process_of('gateway-0')['http_address']}"

    @property
    def grpc_address(self) -> str:
        return str(self.process_of("router-0")["address"])

    @property
    def model(self) -> str:
        """The first served model."""
        return next(str(one["model"]) for one in self.status()["processes"] if one["model"])

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to one process of the mesh, by its own id."""
        pid = int(self.process_of(name)["pid"])
        os.kill(pid, number)
        return pid

    def wait_serving(self, timeout_s: float = START_TIMEOUT_S, *, restarted: str = "") -> None:
        """Until every process is healthy, and the one named `restarted` has been started again."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"meshfire up ended:\n{self.output.read_text()[-4000:]}"
            processes = self.status()["processes"]
            back = [one for one in processes if one["name"] == restarted and not one["restarts"]] == []
            if processes and back and all(one["health"] == "serving" for one in processes):
                return
            time.sleep(0.3)
        raise AssertionError(f"not all serving after {timeout_s} s:\n{self.output.read_text()[-4000:]}\n{self.logs()}")

    def logs(self, num_lines: int = 15) -> str:
        """The ends of all logs."""
        folder = self.folder / "logs"
        ends = [f"== {one.name}\n" + "\n".join(one.read_text().splitlines()[-num_lines:]) for one in folder.glob("*")]
        return "\n".join(ends)


@contextmanager
def start_mesh(
    topology: Mapping[str, Any], folder: Path, env: Mapping[str, str] | None = None
) -> Iterator[MeshProcess]:
    """`meshfire up` with a topology; state, logs and traces stay below `folder`. Stops by its own process id."""
    file = folder / "topology.yaml"
    file.write_text(yaml.safe_dump(dict(topology)))
    env = {**os.environ, "MESHFIRE_STATE_DIR": str(folder / "state"), **(env or {})}
    output = folder / "up.log"
    with output.open("wb") as sink:
        command = [str(BIN / "meshfire"), "up", "--topology", str(file)]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL)
    mesh = MeshProcess(process, env, str(topology.get("mesh", "local")), output)
    try:
        mesh.wait_serving()
        yield mesh
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
