"""One end of a lane: whole frames over a Unix socket, never waiting (ADR 11).

Owns the socket, what of a frame has come or gone so far, and the names under which shards listen: Linux's abstract
names, which leave no file behind and which other network namespaces do not see. Only processes of the same user are
taken. Waiting is the business of whoever holds several lanes.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
import threading
from collections import deque
from contextlib import suppress

from meshfire.errors import MeshfireError, ShardUnavailable
from meshfire.rpc.lane_frame import HEAD_BYTES, Frame, Spares, pack, unpack

SUPPORTED = sys.platform == "linux"
_PREFIX = "\0meshfire-hop-"
_BACKLOG = 128
#: asked for; the kernel may give less. An answer of a decode step fits, so that a shard seldom waits for its caller.
_SEND_BUFFER_BYTES = 1024 * 1024
_MAX_PARTS = 64
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class _SharedSocket(socket.socket):
    """Closed when the last user lets go: only when no thread uses it any more may its number go to another file."""

    def __del__(self) -> None:
        self.close()


class LaneSocket:
    """`send` and `flush` may be called on any thread; `receive` on one at a time."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        #: no frame will come or go any more
        self.broken = False
        self._socket = _SharedSocket(fileno=connected.detach())
        self._spares = Spares()
        self._sending = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._head = bytearray(HEAD_BYTES)
        self._missing: list[memoryview] = [memoryview(self._head)]
        self._coming: tuple[Frame, bytearray] | None = None

    def fileno(self) -> int:
        """For poll."""
        return self._socket.fileno()

    @property
    def is_choked(self) -> bool:
        """Something waits until the other side has read."""
        return bool(self._unsent)

    def send(self, frame: Frame) -> None:
        """Send what the socket takes now, keep the rest for `flush`. A broken lane drops it."""
        with self._sending:
            self._unsent.extend(pack(frame))
            self._flush()

    def flush(self) -> None:
        """Go on with what `send` has left."""
        with self._sending:
            self._flush()

    def receive(self) -> Frame | None:
        """The next frame, or None if it is not there yet or the lane is broken."""
        try:
            while not self.broken:
                if not self._fill():
                    return None
                if self._coming is not None:
                    frame, text = self._coming
                    frame.text = bytes(text)
                    self._coming, self._missing = None, [memoryview(self._head)]
                    return frame
                frame, self._missing, text = unpack(self._head, self._spares)
                self._coming = frame, text
        except (OSError, MeshfireError):  # gone, or not a peer of ours
            self.shut()
        return None

    def shut(self) -> None:
        """End it for both sides. Any thread, any number of times."""
        self.broken = True
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def _fill(self) -> bool:
        """Read into what is missing; whether all of it is there."""
        while self._missing:
            views = [view for view in self._missing if view.nbytes]
            if not views:
                self._missing = []
                return True
            try:
                num_bytes = self._socket.recvmsg_into(views)[0]
            except BlockingIOError:
                return False
            if not num_bytes:
                raise ConnectionResetError
            self._missing = _after(views, num_bytes)
        return True

    def _flush(self) -> None:
        try:
            while self._unsent and not self.broken:
                views = [self._unsent[index] for index in range(min(len(self._unsent), _MAX_PARTS))]
                num_bytes = self._socket.sendmsg(views)
                for _ in views:
                    self._unsent.popleft()
                self._unsent.extendleft(reversed(_after(views, num_bytes)))
        except BlockingIOError:
            return
        except OSError:
            self.shut()
        if self.broken:
            self._unsent.clear()


def listen() -> tuple[socket.socket, str]:
    """(a listening socket that does not block, its name for `connect`). Raises OSError where there are none."""
    name = secrets.token_hex(16)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_PREFIX + name)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener, name


def accept(listener: socket.socket) -> LaneSocket | None:
    """The next caller, or None if there is none or it is another user's process."""
    try:
        connected, _ = listener.accept()
    except OSError:
        return None
    if not _is_mine(connected):
        connected.close()
        return None
    return LaneSocket(connected)


def connect(name: str) -> LaneSocket:
    """The lane to whoever listens under `name`. Raises ShardUnavailable: not on this machine, or not for this user."""
    if not SUPPORTED or not name:
        raise ShardUnavailable("it offers no local socket" if SUPPORTED else "this system has no abstract sockets")
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.setblocking(False)
        connected.connect(_PREFIX + name)
        if not _is_mine(connected):
            raise PermissionError("it belongs to another user")
    except OSError as error:
        connected.close()
        raise ShardUnavailable(f"its local socket is out of reach: {error}") from None
    return LaneSocket(connected)


def _is_mine(connected: socket.socket) -> bool:
    """Whether the other side's process runs as the same user."""
    _, uid, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(uid == os.geteuid())


def _after(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of `views` after their first `num_bytes`."""
    for index, view in enumerate(views):
        if num_bytes < view.nbytes:
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= view.nbytes
    return []
