"""Is the process that wrote a file still the same, and alive? Owns the mark; knows nothing of registries.

A process id alone can be reused, so the mark holds the start time as well where /proc tells it (Linux; proc(5), field
22 of /proc/PID/stat). A zombie counts as dead: it serves nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessMark:
    """`started` is in clock ticks since boot; 0 where unknown."""

    pid: int
    started: int

    @classmethod
    def of_this_process(cls) -> ProcessMark:
        stat = _stat(os.getpid())
        return cls(os.getpid(), stat[1] if stat else 0)

    def is_alive(self) -> bool:
        """Whether that very process runs on this machine."""
        if not Path("/proc/self/stat").exists():
            return _answers_signals(self.pid)
        stat = _stat(self.pid)
        if stat is None or stat[0] in "ZX":
            return False
        return self.started in (0, stat[1])


def _stat(pid: int) -> tuple[str, int] | None:
    """(state letter, start time), or None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command name before it may hold blanks and brackets
    return fields[0], int(fields[19])


def _answers_signals(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
