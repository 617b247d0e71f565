"""A generating endpoint: HTTP request in, one or more Generate calls, JSON or server-sent events out.

Owns the order of things and when the answer begins; the words are a `Dialect`'s. Nothing is sent before every call was
admitted and the first token (or end) is there, so that whatever fails until then gets its proper status.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from meshfire.api.router.v1 import inference_service_pb2 as pb
from services.gateway import receipt, sse
from services.gateway.access.door import Door
from services.gateway.access.visitor import Visitor
from services.gateway.dialect import Dialect, Job, Json, Renderer
from services.gateway.errors import ClientGone, as_http
from services.gateway.exchange import (
    TRACEPARENT_HEADER,
    affinity_in,
    hooks_in,
    read_json,
    unless_gone,
)
from services.gateway.fan_out import Start, fan_out
from services.gateway.names import ModelNames
from services.gateway.observe import Observer, Seen
from services.gateway.outputs import Output, Piece, total
from services.gateway.reply import Reply
from services.gateway.routers import Metadata, Routers

#: What the answer cost, as Workers AI tells it.
NEURONS_HEADER = "cf-ai-neurons"

#: answers some bodies without generating; None = not this one
Instead = Callable[[Scope, Dialect, object, Visitor], Awaitable[Json | None]]
Messages = AsyncIterator[tuple[int, pb.GenerateResponse]]


@dataclass(frozen=True)
class Limits:
    """Of one request."""

    max_body_bytes: int
    timeout_s: float


class GenerateEndpoint:
    """An ASGI application for one route."""

    def __init__(
        self,
        route: str,
        dialect: Dialect,
        routers: Routers,
        names: ModelNames,
        door: Door,
        observer: Observer,
        limits: Limits,
        instead: Instead | None = None,
    ) -> None:
        self._route = route
        self._dialect = dialect
        self._names = names
        self._instead = instead
        self._routers = routers
        self._door = door
        self._observer = observer
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, path = Headers(scope=scope), scope.get("path_params", {})
        dialect = self._dialect.at(path)
        with self._observer.request(scope["method"], self._route, headers.get(TRACEPARENT_HEADER)) as seen:
            reply = Reply(send, seen)
            try:
                await self._answer(scope, dialect, receive, reply, seen)
            except ClientGone:
                seen.abandoned()
            except Exception as error:
                await self._fail(dialect, error, reply, seen)

    async def _answer(self, scope: Scope, dialect: Dialect, receive: Receive, reply: Reply, seen: Seen) -> None:
        headers, deadline = Headers(scope=scope), _now() + self._limits.timeout_s
        visitor = await self._door.enter(headers, scope.get("path_params", {}).get("account_id"))
        body = await read_json(
            headers, receive, max_bytes=self._limits.max_body_bytes, timeout_s=self._limits.timeout_s
        )
        if self._instead is not None and (other := await self._instead(scope, dialect, body, visitor)) is not None:
            await reply.json(200, other)
            return
        job = dialect.parse(body)
        seen.asked(job.model, stream=job.stream)
        served = await self._names.resolve(job.model)
        common = [(TRACEPARENT_HEADER, seen.traceparent), *hooks_in(headers)]
        affinity = affinity_in(headers)
        for call in job.calls:
            call.request.model = served
            call.request.session_key = affinity or call.request.session_key
            call.request.cache_salt = visitor.cache_salt(call.request.cache_salt)
        outputs = [Output(index, call.prompt_index) for index, call in enumerate(job.calls)]
        seen.outputs = outputs
        answer = _Answer(job, outputs, seen)
        starts = self._starts(job, visitor, common, deadline)
        async with self._door.admitted(visitor, served), unless_gone(receive), fan_out(starts) as messages:
            await (answer.stream(messages, reply) if job.stream else answer.collect(messages))
        # The outcome is certain now: a client that leaves from here on has what it asked for.
        await answer.finish(reply)

    def _starts(self, job: Job, visitor: Visitor, common: Metadata, deadline: float) -> Sequence[Start]:
        starts: list[Start] = []
        paid: set[int] = set()
        for call in job.calls:
            billing = visitor.metadata(pays_for_prompt=call.prompt_index not in paid)
            paid.add(call.prompt_index)
            metadata = [*common, *billing]
            starts.append(partial(self._routers.generate, call.request, metadata, deadline - _now()))
        return starts

    async def _fail(self, dialect: Dialect, error: Exception, reply: Reply, seen: Seen) -> None:
        failure = dialect.explain(as_http(error))
        seen.failed(failure)
        body = dialect.error_body(failure)
        if reply.started:
            await reply.close_stream(sse.event(body) + sse.DONE)
        else:
            await reply.json(failure.status, body, failure.headers)


class _Answer:
    """The outputs of one job on their way to the client."""

    def __init__(self, job: Job, outputs: Sequence[Output], seen: Seen) -> None:
        self._job = job
        self._outputs = outputs
        self._seen = seen
        self._render: Renderer | None = None

    async def collect(self, messages: Messages) -> None:
        async for index, message in messages:
            self._outputs[index].add(message)

    async def stream(self, messages: Messages, reply: Reply) -> None:
        held: list[tuple[Output, Piece]] = []
        async for index, message in messages:
            output = self._outputs[index]
            held.append((output, output.add(message)))
            if not reply.started and self._may_begin(held):
                await reply.open_stream()
            if reply.started:
                await reply.write(sse.events(self._chunks(held)))
                held.clear()

    async def finish(self, reply: Reply) -> None:
        renderer = self._renderer()
        if self._job.stream:
            await reply.close_stream(sse.events(renderer.closing(self._outputs)) + sse.DONE)
        else:
            headers = {NEURONS_HEADER: f"{total(self._outputs).neurons:.2f}"}
            receipts = [output.finished.receipt for output in self._outputs if output.finished is not None]
            await reply.json(200, renderer.whole(self._outputs), headers | receipt.header(receipts))

    def _may_begin(self, held: Sequence[tuple[Output, Piece]]) -> bool:
        if not all(output.started for output in self._outputs):
            return False
        self._renderer()
        return any(not piece.started for _, piece in held)

    def _chunks(self, held: Sequence[tuple[Output, Piece]]) -> list[Json]:
        renderer = self._renderer()
        return [chunk for output, piece in held for chunk in renderer.chunks(output, piece)]

    def _renderer(self) -> Renderer:
        """Made when the router has named the request: the first output's id is the answer's."""
        if self._render is None:
            started = self._outputs[0].started
            if started is not None and started.request_id:
                self._seen.request_id = started.request_id
            self._render = self._job.renderer(self._seen.request_id, int(time.time()))
        return self._render


def _now() -> float:
    return asyncio.get_running_loop().time()
