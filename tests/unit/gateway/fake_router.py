"""A router that says what a test tells it to, served over a real loopback socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from meshfire.api.common.v1 import sampling_pb2
from meshfire.api.router.v1 import inference_service_pb2 as pb
from meshfire.api.router.v1 import inference_service_pb2_grpc as rpc
from meshfire.rpc.interceptors import ErrorsToStatus
from meshfire.rpc.limits import SERVER_OPTIONS

PROMPT_IDS = (11, 12, 13)
MODEL = "@cf/test/tiny"

Behaviour = Callable[[pb.GenerateRequest, Any], AsyncIterator[pb.GenerateResponse]]


def started(request_id: str = "r1", prompt_ids: Sequence[int] = ()) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        started=pb.GenerateStarted(
            request_id=request_id, num_prompt_tokens=len(PROMPT_IDS), prompt_token_ids=prompt_ids, seed=1
        )
    )


def delta(
    text: str, ids: Sequence[int] = (), logprobs: Sequence[sampling_pb2.TokenLogprobs] = ()
) -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.GenerateDelta(text=text, token_ids=ids, logprobs=logprobs))


def finished(
    num_output_tokens: int,
    reason: sampling_pb2.FinishReason = sampling_pb2.FINISH_REASON_STOP,
    *,
    num_cached: int = 0,
    **more: Any,
) -> pb.GenerateResponse:
    usage = pb.Usage(
        num_prompt_tokens=len(PROMPT_IDS), num_cached_tokens=num_cached, num_output_tokens=num_output_tokens
    )
    return pb.GenerateResponse(finished=pb.GenerateFinished(finish_reason=reason, usage=usage, **more))


def logprob(piece: bytes, value: float = -0.5, top: Sequence[tuple[bytes, float]] = ()) -> sampling_pb2.TokenLogprobs:
    return sampling_pb2.TokenLogprobs(
        logprob=value,
        piece=piece,
        top_ids=range(len(top)),
        top_logprobs=[one for _, one in top],
        top_pieces=[one for one, _ in top],
    )


def saying(*responses: pb.GenerateResponse) -> Behaviour:
    async def behave(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        for response in responses:
            yield response

    return behave


async def hello(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
    """ "Hello" + " you" + an end token; what was asked for is honoured."""
    wants = request.sampling.HasField("num_logprobs")
    yield started(prompt_ids=PROMPT_IDS if request.return_prompt_token_ids else ())
    yield delta("Hello", [101], [logprob(b"Hello", -0.25, [(b"Hello", -0.25), (b"Hi", -1.5)])] if wants else [])
    yield delta(" you", [102], [logprob(b" you", -0.75, [(b" all", -0.5)])] if wants else [])
    yield finished(3, stop_token_id=2)


async def endless(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
    yield started()
    while True:
        yield delta("x", [7])
        await asyncio.sleep(0.005)


async def silent(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
    """Admitted, and then nothing: a long prefill."""
    yield started()
    await asyncio.Event().wait()


def failing(error: Exception, *before: pb.GenerateResponse) -> Behaviour:
    async def behave(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        for response in before:
            yield response
        raise error

    return behave


@dataclass
class FakeRouter(rpc.InferenceServiceServicer):
    """`behave` answers Generate; what came in is kept."""

    behave: Behaviour = hello
    models: tuple[str, ...] = (MODEL,)
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    num_cancelled: int = 0
    num_running: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def reset(self) -> None:
        self.behave, self.models, self.num_cancelled = hello, (MODEL,), 0
        self.requests.clear()
        self.metadata.clear()

    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.num_running += 1
        try:
            async for response in self.behave(request, context):
                yield response
        except (asyncio.CancelledError, GeneratorExit):  # cancelled while it waited, or while it wrote
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
            async with self.changed:
                self.changed.notify_all()

    async def ListModels(  # type: ignore[override]
        self, request: pb.ListModelsRequest, context: Any
    ) -> pb.ListModelsResponse:
        models = [pb.Model(name=name, revision="r", context_tokens=64, vocab_size=256) for name in self.models]
        return pb.ListModelsResponse(models=models)

    async def CountTokens(  # type: ignore[override]
        self, request: pb.CountTokensRequest, context: Any
    ) -> pb.CountTokensResponse:
        raise NotImplementedError

    async def idle(self) -> None:
        """Return once no Generate runs here; bounded by the test's own timeout."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.num_running == 0)


async def serve(router: FakeRouter) -> tuple[grpc.aio.Server, str]:
    """A listening server and its address."""
    server = grpc.aio.server(interceptors=[ErrorsToStatus()], options=SERVER_OPTIONS)
    rpc.add_InferenceServiceServicer_to_server(router, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"
