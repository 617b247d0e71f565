"""Ports for the processes of a mesh."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable


def counted_from(base: int) -> Callable[[], int]:
    """base, base + 1, …"""
    counter = itertools.count(base)
    return lambda: next(counter)


def free_ports(host: str = "127.0.0.1") -> Callable[[], int]:
    """A free port at each call, never the same twice. It is free when asked, not reserved."""
    given: set[int] = set()

    def next_port() -> int:
        while True:
            with socket.socket() as probe:
                probe.bind((host, 0))
                port = int(probe.getsockname()[1])
            if port not in given:
                given.add(port)
                return port

    return next_port
