"""The state file of a local mesh."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from meshfire.cluster import state
from meshfire.cluster.topology import parse
from meshfire.cluster.up import up
from meshfire.errors import NotFound, Refused


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFIRE_STATE_DIR", str(tmp_path))


def written(supervisor_pid: int) -> state.MeshState:
    router = state.ProcessState("router-0", "router", "127.0.0.1:1", health="serving", pid=7)
    mesh = state.MeshState("local", supervisor_pid, "static:/x", "/t", [router])
    mesh.write(state.folder_of("local"))
    return mesh


def test_a_mesh_that_is_up_is_read_back_whole() -> None:
    mesh = written(os.getpid())
    assert state.read("local") == mesh
    assert state.read("local").first("router").pid == 7
    with pytest.raises(NotFound, match="no decode"):
        state.read("local").first("decode")


def test_a_mesh_whose_supervisor_died_is_not_up() -> None:
    with pytest.raises(NotFound, match="meshfire up"):
        state.read("local")
    process = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(process, 0)
    written(process)
    with pytest.raises(NotFound, match="meshfire up"):
        state.read("local")


async def test_a_second_mesh_of_the_same_name_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    written(os.getpid())
    log = state.folder_of("local") / "logs" / "router-0.log"
    log.parent.mkdir()
    log.write_text("kept")
    with pytest.raises(Refused, match="up already"):
        await up(parse({"models": [{"model": "m"}]}), [], asyncio.Event(), root=tmp_path, on_change=lambda _: None)
    assert log.read_text() == "kept"
