"""The supervisor, over tiny processes that only speak grpc.health.v1."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from meshfire.cluster import ports, supervisor
from meshfire.cluster.plan import ProcessSpec
from meshfire.cluster.supervisor import Supervisor
from meshfire.errors import Unavailable

SERVICE = """
import asyncio, os, sys
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

async def main():
    server = grpc.aio.server()
    probes = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(probes, server)
    assert server.add_insecure_port(os.environ["ADDRESS"])
    await probes.set("", health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    await asyncio.Event().wait()

asyncio.run(main())
"""


def spec(folder: Path, name: str, code: str = SERVICE) -> ProcessSpec:
    """A process of `services/<name>`, run from `folder`."""
    package = folder / "services" / name
    package.mkdir(parents=True)
    (folder / "services" / "__init__.py").touch()
    (package / "__main__.py").write_text(code)
    address = f"127.0.0.1:{ports.free_ports()()}"
    return ProcessSpec(name, name, address, {"ADDRESS": address, "PATH": os.environ["PATH"]}, [])


async def until(condition: object, timeout_s: float = 30) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.05)


async def test_a_killed_or_frozen_process_comes_back_and_all_stop_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FROZEN_S", 0.5)
    stop = asyncio.Event()
    mesh = Supervisor([spec(tmp_path, "router")], tmp_path, tmp_path, lambda: None)
    async with asyncio.TaskGroup() as group:
        group.create_task(mesh.run(stop))
        await until(lambda: mesh.all_serving)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            before = mesh.states[0].pid
            assert before
            os.kill(before, number)
            await until(lambda old=before: mesh.all_serving and mesh.states[0].pid != old)
        pid = mesh.states[0].pid
        assert mesh.states[0].restarts == 2
        stop.set()
    assert mesh.states[0].health == "stopped"
    assert pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_process_that_never_starts_ends_the_mesh_with_its_log(tmp_path: Path) -> None:
    broken = spec(tmp_path, "decode", "raise SystemExit('MODEL_DIR is missing')")
    mesh = Supervisor([broken], tmp_path, tmp_path, lambda: None)
    with pytest.raises(ExceptionGroup) as caught:
        await mesh.run(asyncio.Event())
    error = caught.value.exceptions[0]
    assert isinstance(error, Unavailable)
    assert "MODEL_DIR is missing" in error.message
    assert sys.executable in broken.command
