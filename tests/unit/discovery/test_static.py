"""Files as a registry: seeds, live registrations, dead processes, compare-and-set between processes."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import pytest

from meshfire.discovery.base import Instance
from meshfire.discovery.process import ProcessMark
from meshfire.discovery.static import StaticRegistry
from meshfire.discovery.topology import TopologyFiles
from meshfire.errors import BadInput

SEED = {
    "service": "meshfire-router",
    "instance_id": "router-seed",
    "address": "127.0.0.1:1",
    "metadata": {"model": "m"},
}
MINE = Instance("meshfire-router", "../odd id/№1", "127.0.0.1:2", {"model": "é"})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "topology.json"


def test_a_topology_file_that_people_write_is_served_beside_live_registrations(path: Path) -> None:
    path.write_text(json.dumps({"instances": [SEED], "kv": {"text": "abc", "object": {"epoch": 1}}}))
    files = TopologyFiles(path)
    files.write_instance(MINE, ProcessMark.of_this_process())
    seed = Instance("meshfire-router", "router-seed", "127.0.0.1:1", {"model": "m"})
    assert files.instances_of("meshfire-router") == (MINE, seed)
    assert files.read_kv("text") is not None
    assert files.read_kv("text").value == b"abc"  # type: ignore[union-attr]
    assert json.loads(files.read_kv("object").value) == {"epoch": 1}  # type: ignore[union-attr]


def test_a_seeded_document_is_guarded_like_any_other(path: Path) -> None:
    path.write_text(json.dumps({"kv": {"k": "seed"}}))
    files = TopologyFiles(path)
    assert not files.write_kv("k", b"x", 0)
    assert files.write_kv("k", b"x", 1)
    assert files.read_kv("k") is not None
    assert files.read_kv("k").index == 2  # type: ignore[union-attr]


def test_what_others_change_right_after_a_read_is_seen_by_the_next_one(path: Path) -> None:
    reader, writer = TopologyFiles(path), TopologyFiles(path)
    for number in range(50):
        instance = Instance("s", f"i{number}", "127.0.0.1:1")
        writer.write_instance(instance, ProcessMark.of_this_process())
        assert instance in reader.instances_of("s")
        writer.remove_instance(instance.instance_id)
        assert instance not in reader.instances_of("s")


def test_no_id_or_key_can_leave_the_directory(path: Path) -> None:
    files = TopologyFiles(path)
    files.write_instance(MINE, ProcessMark.of_this_process())
    files.write_kv("../../outside", b"x", None)
    everything = {entry for entry in path.parent.rglob("*") if entry.is_file()}
    assert all(Path(f"{path}.d") in entry.parents for entry in everything)


def test_the_registration_of_a_process_that_died_is_left_out(path: Path) -> None:
    registering = (
        "import asyncio, sys; from pathlib import Path\n"
        "from meshfire.discovery.base import Instance\n"
        "from meshfire.discovery.static import StaticRegistry\n"
        "asyncio.run(StaticRegistry(Path(sys.argv[1])).register(Instance('s', 'theirs', '127.0.0.1:1')))\n"
        "print('registered', flush=True); sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", registering, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "registered\n"
        files = TopologyFiles(path)
        assert [one.instance_id for one in files.instances_of("s")] == ["theirs"]
        child.kill()
        child.wait()
        assert files.instances_of("s") == ()


def test_a_process_id_that_is_reused_by_another_process_does_not_count() -> None:
    mine = ProcessMark.of_this_process()
    assert mine.is_alive()
    assert not ProcessMark(mine.pid, mine.started + 1).is_alive()
    assert not ProcessMark(2**22 + 1, 0).is_alive()


def test_a_zombie_counts_as_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended and nobody has asked why
    assert not ProcessMark(child.pid, 0).is_alive()
    child.wait()


def _increments(path: Path, times: int) -> None:
    files = TopologyFiles(path)
    for _ in range(times):
        written = False
        while not written:
            entry = files.read_kv("counter")
            number, index = (int(entry.value), entry.index) if entry else (0, 0)
            written = files.write_kv("counter", str(number + 1).encode(), index)


def test_compare_and_set_loses_no_update_between_processes(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=_increments, args=(path, 50)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    entry = TopologyFiles(path).read_kv("counter")
    assert entry is not None
    assert (entry.value, entry.index) == (b"100", 100)


def seed_file(path: Path) -> None:
    path.write_text(json.dumps({"instances": [SEED]}))


def break_file(path: Path, content: str) -> None:
    path.write_text(content)
    with pytest.raises(BadInput):
        TopologyFiles(path).instances_of("meshfire-router")


@pytest.mark.parametrize("broken", ["{", "[]", '{"instances": [{"service": "s"}]}', '{"instances": [3]}'])
async def test_a_topology_file_that_breaks_while_it_is_edited_leaves_the_last_good_list(
    path: Path, broken: str
) -> None:
    seed_file(path)
    registry = StaticRegistry(path, poll_s=0.01)
    async with asyncio.timeout(20), aclosing(registry.watch("meshfire-router")) as stream:
        (seed,) = await anext(stream)
        break_file(path, broken)
        await registry.register(MINE)
        seed_file(path)
        assert await anext(stream) == (MINE, seed)
    await registry.close()
