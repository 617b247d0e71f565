"""Ties a process's life to the supervisor that started it, so that a killed supervisor leaves no orphans."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from meshfire.errors import Unavailable

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Let the kernel kill this process when `parent_pid` ends. Does nothing where the kernel can't (not Linux).

    Raises Unavailable if the parent is gone already.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise Unavailable(f"process {parent_pid}, which started this one, is gone")
