"""The compiled kernels of this process, or why there are none.

Owns loading, the number of threads and the line that says which path runs. Modules that wrap a kernel declare its
arguments themselves. Callers hand over raw pointers: a call costs about a microsecond and lets go of the interpreter.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path

from meshfire.cache_dir import cache_dir
from meshfire.kernels.build import BuildFailed, build

#: `torch` = do without compiled kernels, as where no compiler is found
SWITCH = "MESHFIRE_KERNELS"


@dataclass(frozen=True)
class Kernels:
    """`library` is None where torch computes; `reason` then says why."""

    library: ctypes.CDLL | None
    reason: str = ""

    @property
    def level(self) -> str:
        """The vector instructions in use, or `torch`."""
        return self.library.meshfire_level().decode() if self.library else "torch"

    def set_threads(self, num_threads: int) -> None:
        """Threads of every kernel from now on, the caller's included."""
        if self.library:
            self.library.meshfire_set_threads(num_threads)

    def describe(self) -> str:
        """One line for the log of a process that computes."""
        if self.library is None:
            return f"kernels: torch, {self.reason}"
        threads = self.library.meshfire_num_threads()
        return f"kernels: native {self.level}, {threads} thread{'s' if threads > 1 else ''}"


@functools.cache
def kernels() -> Kernels:
    """This process's kernels, built on first use on this machine (seconds) and kept in the cache folder."""
    if os.environ.get(SWITCH, "") == "torch":
        return Kernels(None, f"{SWITCH}=torch")
    try:
        return load(build(cache_dir() / "kernels"))
    except BuildFailed as error:
        return Kernels(None, str(error))


def load(path: Path) -> Kernels:
    """The kernels in that file, on one thread."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return Kernels(None, f"{path.name} cannot be loaded: {error}")
    library.meshfire_level.restype = ctypes.c_char_p
    library.meshfire_set_threads.argtypes = [ctypes.c_int32]
    library.meshfire_set_threads.restype = None
    library.meshfire_num_threads.restype = ctypes.c_int32
    return Kernels(library)
