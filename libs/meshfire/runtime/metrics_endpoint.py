"""GET /metrics for Prometheus on a port of its own, for services that have no HTTP server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import start_http_server

from meshfire.telemetry.setup import Telemetry


@contextmanager
def serve_metrics(host: str, port: int, telemetry: Telemetry) -> Iterator[None]:
    """Serve the process's metrics until the block ends."""
    server, thread = start_http_server(port, addr=host, registry=telemetry.registry)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
