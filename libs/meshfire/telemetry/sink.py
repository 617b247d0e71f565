"""A small OTLP/gRPC receiver that keeps recent traces in a directory, for a mesh without a collector.

Owns the server and nothing of the format or bounds (`record`, `store`). Traces only, no TLS, loopback: for one machine.
The one module of this package that imports gRPC.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc

from meshfire.telemetry.record import records_of
from meshfire.telemetry.store import Bounds, TraceWriter

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 << 20
"""A batch of spans; exporters send at most a few hundred."""


class TraceSink:
    """`async with TraceSink(directory) as sink:` receives at `sink.endpoint`."""

    def __init__(
        self, directory: Path, *, host: str = "127.0.0.1", port: int = 0, bounds: Bounds | None = None
    ) -> None:
        self._directory = directory
        self._bounds = bounds
        self._host = host
        self._port = port
        self._server: grpc.aio.Server | None = None

    @property
    def endpoint(self) -> str:
        """For an OTLP/gRPC exporter. Its port is known once the sink has been entered."""
        return f"http://{self._host}:{self._port}"

    async def __aenter__(self) -> Self:
        writer = await asyncio.to_thread(TraceWriter, self._directory, self._bounds)
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)])
        rpc.add_TraceServiceServicer_to_server(_Receiver(writer), server)  # type: ignore[no-untyped-call]
        self._port = server.add_insecure_port(f"{self._host}:{self._port}")
        await server.start()
        self._server = server
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            await self._server.stop(1.0)  # exports under way are the last spans of the run


class _Receiver(rpc.TraceServiceServicer):
    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self._one_at_a_time = asyncio.Lock()

    async def Export(
        self, request: pb.ExportTraceServiceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ExportTraceServiceResponse:
        spans = list(records_of(request.resource_spans))
        async with self._one_at_a_time:
            try:
                await asyncio.to_thread(self._writer.add, spans)
            except OSError as error:  # a full disk must not make every service's exporter retry for ever
                log.warning("%d spans not stored: %s", len(spans), error)
        return pb.ExportTraceServiceResponse()
