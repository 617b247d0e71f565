"""Compiling the C++ kernels of `source/` into one shared library, once per machine and version.

Owns the compiler's flags and the cache of libraries. Knows nothing of what the kernels do. Arithmetic is strict: no
fast-math, no contraction of a multiplication and an addition, so the same source gives the same bits everywhere.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

SOURCE = Path(__file__).parent / "source"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-pthread")
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_S = 300
_ERROR_LETTERS = 400


class BuildFailed(Exception):
    """No library here; the message is the reason in a few words. Callers fall back, so it never leaves the package."""


def build(folder: Path, extra_flags: Sequence[str] = ()) -> Path:
    """The library in `folder` for this source, compiler and CPU; compiled first if it is not there yet.

    Several processes may call this at once: one compiles, the others wait. Raises BuildFailed.
    """
    compiler = _compiler()
    flags = (*FLAGS, *extra_flags)
    try:
        library = folder / f"kernels-{_key(compiler, flags)}.so"
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder / ".lock"):
                if not library.exists():
                    _compile(compiler, flags, library)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildFailed(f"{Path(compiler).name} failed: {error}") from None
    return library


def _compiler() -> str:
    for name in _COMPILERS:
        if found := shutil.which(name):
            return found
    raise BuildFailed("no C++ compiler found")


def _key(compiler: str, flags: Sequence[str]) -> str:
    """Changes with everything that may change the code: sources, flags, compiler, the CPU's instruction sets."""
    digest = hashlib.sha256()
    for path in _files():
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    digest.update("\0".join((compiler, *flags, _run((compiler, "--version")), _cpu_flags())).encode())
    return digest.hexdigest()[:16]


def _files() -> list[Path]:
    return sorted(path for path in SOURCE.iterdir() if path.suffix in {".cpp", ".h"})


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(compiler: str, flags: Sequence[str], library: Path) -> None:
    sources = [path for path in _files() if path.suffix == ".cpp"]
    with TemporaryDirectory(dir=library.parent, prefix=".build-") as scratch:
        objects = [str(Path(scratch, f"{path.stem}.o")) for path in sources]
        commands = [(compiler, *flags, "-c", str(path), "-o", out) for path, out in zip(sources, objects, strict=True)]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as jobs:
            list(jobs.map(_run, commands))
        finished = Path(scratch, library.name)
        _run((compiler, *flags, "-shared", *objects, "-o", str(finished)))
        finished.replace(library)


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
    if done.returncode:
        raise BuildFailed(f"{Path(command[0]).name} failed: {done.stderr.strip()[:_ERROR_LETTERS]}")
    return done.stdout


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
