"""uvicorn inside a process that has its own life: no signal handlers, no loop and no socket of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 = a free one. OSError if the port is taken: better at the start than later."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> str:
    """host:port, as a client writes it."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class HttpServer(uvicorn.Server):
    """Serves one application on one socket. `run()` in a task; `drain()` ends it when running answers are complete."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            # Keep-alive longer than load balancers' usual 60 s, so that it is they who close idle connections.
            timeout_keep_alive=75,
        )
        super().__init__(config)
        self._listener = listener
        self._up = asyncio.Event()
        self._ended = asyncio.Event()

    async def run_on_socket(self) -> None:
        """Serve until drained or cancelled."""
        try:
            await self.serve(sockets=[self._listener])
        finally:
            self._abandon()
            self._ended.set()

    def _abandon(self) -> None:
        """What a drain that took too long left open: uvicorn's own tasks are in no task group."""
        for task in list(self.server_state.tasks):
            task.cancel()
        for connection in list(self.server_state.connections):
            connection.transport.close()
        self._listener.close()

    async def ready(self) -> None:
        """Return once connections are accepted."""
        await self._up.wait()

    async def drain(self) -> None:
        """Accept no more, let running answers end."""
        self.should_exit = True
        await self._ended.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the runtime's."""
        yield
