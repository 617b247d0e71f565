"""One worker's Work stream: its messages to the desk, the desk's messages to it.

Owns the stream's order (hello first, welcome first) and its end. A worker that does not read its messages loses its
stream: the router waits for nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.errors import BadInput, Exhausted, InternalError, MeshfireError
from services.router import wire
from services.router.desk import Desk
from services.router.workers import Worker

_log = logging.getLogger(__name__)

#: Leases are bounded by credit, so only cancels and grants can pile up.
_MAX_WAITING = 4096


class WorkStream:
    """Reads in a task of its own, so that leaving does not depend on gRPC closing a generator."""

    def __init__(self, desk: Desk, router_id: str, requests: AsyncIterator[pb.WorkRequest]) -> None:
        self._desk = desk
        self._router_id = router_id
        self._requests = requests
        self._outgoing: asyncio.Queue[pb.WorkResponse | None] = asyncio.Queue(_MAX_WAITING)
        self._error: MeshfireError | None = None
        self._closed = False

    def send(self, message: pb.WorkResponse) -> None:
        """To the worker; never waits."""
        if self._closed:
            return
        try:
            self._outgoing.put_nowait(message)
        except asyncio.QueueFull:
            self._close(Exhausted(f"the worker left {_MAX_WAITING} messages unread"))

    async def responses(self) -> AsyncIterator[pb.WorkResponse]:
        """What goes to the worker, until the stream ends."""
        while (message := await self._outgoing.get()) is not None:
            yield message
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the stream without an error."""
        self._close(None)

    async def read(self) -> None:
        """Everything the worker says, until it goes; then its work fails over."""
        worker: Worker | None = None
        try:
            async for request in self._requests:
                if worker is None:
                    worker = self._welcome(request)
                else:
                    self._take(worker, request)
            self._close(None)
        except MeshfireError as error:
            _log.warning("worker %s: %s", worker.facts.worker_id if worker else "unknown", error)
            self._close(error)
        except Exception:
            # One worker's odd message must not end the process; its stream is over.
            _log.exception("worker %s", worker.facts.worker_id if worker else "unknown")
            self._close(InternalError("the router could not take a message"))
        finally:
            if worker is not None:
                _log.info("worker %s left", worker.facts.worker_id)
                self._desk.leave(worker)
            self._close(None)

    def _close(self, error: MeshfireError | None) -> None:
        if self._closed:
            return
        self._closed = True
        self._error = error
        if self._outgoing.full():
            # The reader is behind by a whole queue: what it misses does not matter, the stream ends.
            self._outgoing.get_nowait()
        self._outgoing.put_nowait(None)

    def _welcome(self, request: pb.WorkRequest) -> Worker:
        if request.WhichOneof("message") != "hello":
            raise BadInput("the first message is not a hello", field="hello")
        worker = Worker(wire.worker_from(request.hello))
        self.send(pb.WorkResponse(welcome=pb.RouterWelcome(router_id=self._router_id)))
        self._desk.join(worker, self.send)
        facts = worker.facts
        _log.info("%s worker %s serves %s at %s", facts.stage.value, facts.worker_id, facts.model, facts.address)
        return worker

    def _take(self, worker: Worker, request: pb.WorkRequest) -> None:
        kind, worker_id = request.WhichOneof("message"), worker.facts.worker_id
        if kind == "progress":
            for progress in request.progress.tokens:
                self._desk.deliver(progress.request_id, wire.progress_from(worker_id, progress))
        elif kind == "credit":
            self._desk.credit(worker, request.credit)
        elif kind == "kv_events":
            events = request.kv_events
            worker.prefixes.apply(reset=events.reset, stored=events.stored, removed=events.removed)
        elif kind == "prompt_logprobs":
            scored = wire.scored_from(worker_id, request.prompt_logprobs)
            self._desk.deliver(request.prompt_logprobs.request_id, scored)
        elif kind == "prompt_computed":
            computed = wire.prompt_computed_from(worker_id, request.prompt_computed)
            self._desk.deliver(request.prompt_computed.request_id, computed)
        elif kind == "kv_offer":
            self._desk.deliver(request.kv_offer.request_id, wire.offer_from(worker_id, request.kv_offer))
        elif kind == "finished":
            self._desk.deliver(request.finished.request_id, wire.completion_from(worker_id, request.finished))
        elif kind == "failed":
            self._desk.deliver(request.failed.request_id, wire.failure_from(worker_id, request.failed))
        else:
            raise BadInput(f"a {kind or 'message of an unknown kind'} has no place here", field="message")
