"""Kernels are built once, by whoever comes first; where they cannot be, the reason is told."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meshfire.kernels import build as builder
from meshfire.kernels import native
from meshfire.kernels.build import BuildFailed, build
from meshfire.kernels.native import Kernels, kernels, load

compiled = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source of two files that takes a moment to compile."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "one.cpp").write_text('#include "both.h"\nextern "C" int one() { return VALUE; }\n')
    (source / "two.cpp").write_text('#include "both.h"\nextern "C" int two() { return 2 * VALUE; }\n')
    (source / "both.h").write_text("#define VALUE 21\n")
    monkeypatch.setattr(builder, "SOURCE", source)
    monkeypatch.setattr(builder, "FLAGS", ("-fPIC",))
    return source


@compiled
def test_a_second_build_takes_the_first_ones_library_and_a_change_makes_another(
    small_source: Path, tmp_path: Path
) -> None:
    first = build(tmp_path / "cache")
    written = first.stat().st_mtime_ns
    assert build(tmp_path / "cache") == first
    assert first.stat().st_mtime_ns == written
    assert ctypes.CDLL(str(first)).two() == 42
    (small_source / "both.h").write_text("#define VALUE 4\n")
    changed = build(tmp_path / "cache")
    assert changed != first
    assert ctypes.CDLL(str(changed)).one() == 4
    assert build(tmp_path / "cache", ["-DOTHER"]) not in {first, changed}


@compiled
def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from meshfire.kernels import build as b\n"
        "plain = b._compile\n"
        "def counted(*args): print('compiled'); plain(*args)\n"
        "b._compile = counted; b.SOURCE = Path(sys.argv[1]); b.build(Path(sys.argv[2]))"
    )
    source = tmp_path / "source"
    source.mkdir()
    (source / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    command = [sys.executable, "-c", program, str(source), str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=50)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert "".join(outputs).count("compiled") == 1


@compiled
def test_source_that_does_not_compile_is_told_and_leaves_nothing(small_source: Path, tmp_path: Path) -> None:
    (small_source / "two.cpp").write_text("this is not C++\n")
    with pytest.raises(BuildFailed, match=r"failed: .*two\.cpp"):
        build(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_no_compiler_means_torch_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MESHFIRE_CACHE_DIR", str(tmp_path / "cache"))
    kernels.cache_clear()
    try:
        assert kernels().describe() == "kernels: torch, no C++ compiler found"
        kernels().set_threads(2)
    finally:
        kernels.cache_clear()


def test_the_switch_leaves_compiled_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "torch")
    kernels.cache_clear()
    try:
        assert kernels() == Kernels(None, "MESHFIRE_KERNELS=torch")
    finally:
        kernels.cache_clear()


def test_a_damaged_library_is_a_reason_not_a_crash(tmp_path: Path) -> None:
    damaged = tmp_path / "kernels-0.so"
    damaged.write_bytes(b"\x7fELF")
    assert load(damaged).describe().startswith("kernels: torch, kernels-0.so cannot be loaded")


@compiled
def test_the_real_source_says_its_level_and_threads() -> None:
    found = kernels()
    assert found.level in {"avx512-vnni", "avx2", "scalar"}
    found.set_threads(2)
    assert found.describe() == f"kernels: native {found.level}, 2 threads"
    found.set_threads(1)
    assert found.describe() == f"kernels: native {found.level}, 1 thread"


@compiled
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    program = (
        "import os, sys, warnings; warnings.simplefilter('ignore')\n"
        "from meshfire.kernels.native import kernels\n"
        "kernels().set_threads(2)\n"
        "pid = os.fork()\n"
        "if pid == 0: kernels().set_threads(3); os._exit(0 if '3 threads' in kernels().describe() else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=50).returncode == 0
