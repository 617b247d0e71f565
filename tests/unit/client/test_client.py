"""The public client against a scripted router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from meshfire.api.common.v1 import sampling_pb2
from meshfire.api.router.v1 import inference_service_pb2 as pb
from meshfire.api.router.v1 import inference_service_pb2_grpc as rpc
from meshfire.client import Delta, Finished, MeshfireClient, Message, Model, Sampling, Started
from meshfire.client.prompts import sampling_to
from meshfire.discovery.base import Instance
from meshfire.discovery.memory import MemoryRegistry
from meshfire.errors import BadInput, Draining, InternalError, MeshfireError, NoWorker, QueueFull
from meshfire.rpc.interceptors import ErrorsToStatus


class Router(rpc.InferenceServiceServicer):
    """Answers every call alike, or refuses."""

    def __init__(self, refusal: MeshfireError | None = None) -> None:
        self.refusal = refusal
        self.requests: list[Any] = []
        self.metadata: dict[str, Any] = {}
        self.cancelled = asyncio.Event()
        self.endless = False

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self._note(request, context)
        context.add_done_callback(lambda _: self.cancelled.set())
        yield pb.GenerateResponse(started=pb.GenerateStarted(request_id="q", seed=5, num_prompt_tokens=3))
        yield pb.GenerateResponse()  # of a kind that this client does not know
        logprobs = sampling_pb2.TokenLogprobs(
            logprob=-1.0, top_ids=[4], top_logprobs=[-1.0], piece=b"a", top_pieces=[b"b"]
        )
        yield pb.GenerateResponse(delta=pb.GenerateDelta(text="a", token_ids=[4], logprobs=[logprobs]))
        while self.endless:
            await asyncio.sleep(0.01)
            yield pb.GenerateResponse(delta=pb.GenerateDelta(text="a"))
        finished = pb.GenerateFinished(
            finish_reason=sampling_pb2.FINISH_REASON_LENGTH,
            usage=pb.Usage(num_prompt_tokens=3, num_output_tokens=1),
            receipt=pb.RoutingReceipt(decode_worker_id="d"),
        )
        yield pb.GenerateResponse(finished=finished)

    async def CountTokens(self, request: pb.CountTokensRequest, context: Any) -> pb.CountTokensResponse:
        self._note(request, context)
        return pb.CountTokensResponse(num_tokens=3)

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        self._note(request, context)
        return pb.ListModelsResponse(models=[pb.Model(name="m", revision="r", context_tokens=8, vocab_size=9)])

    def _note(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        if self.refusal is not None:
            raise self.refusal


@asynccontextmanager
async def serving(*routers: Router) -> AsyncIterator[list[str]]:
    servers, addresses = [], []
    for router in routers:
        server = grpc.aio.server(interceptors=[ErrorsToStatus()])
        rpc.add_InferenceServiceServicer_to_server(router, server)
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        servers.append(server)
    try:
        yield addresses
    finally:
        for server in servers:
            await server.stop(None)


async def test_a_generation_is_read_as_typed_events() -> None:
    router = Router()
    async with serving(router) as (address,), MeshfireClient(address) as client:
        chat = [Message("user", "hi", name="ann")]
        options = {"session_key": "s", "asynchronous": True, "template_kwargs": {"thinking": False}}
        stream = client.generate("m", chat, Sampling(seed=0, stop=["x"]), metadata={"traceparent": "t"}, **options)
        started, delta, finished = [event async for event in stream]
    assert isinstance(started, Started)
    assert (started.request_id, started.seed) == ("q", 5)
    assert isinstance(delta, Delta)
    assert (delta.text, delta.token_ids, delta.logprobs[0].top_pieces) == ("a", (4,), (b"b",))
    assert isinstance(finished, Finished)
    assert (finished.finish_reason, finished.stop_hit, finished.stop_token_id) == ("length", None, None)
    assert finished.receipt.decode_worker_id == "d"
    (request,) = router.requests
    assert request.chat.messages[0].name == "ann"
    assert request.chat.template_kwargs_json == '{"thinking": false}'
    assert request.sampling.HasField("seed")
    assert not request.sampling.HasField("temperature")
    assert request.priority == pb.PRIORITY_ASYNCHRONOUS
    assert router.metadata["traceparent"] == "t"


async def test_prompts_may_be_chats_texts_or_token_ids() -> None:
    router = Router()
    async with serving(router) as (address,), MeshfireClient(address) as client:
        for prompt in ([Message("user", "x")], "x", [1, 2]):
            async for _ in client.generate("m", prompt):  # type: ignore[arg-type]
                pass
        assert [one.WhichOneof("prompt") for one in router.requests] == ["chat", "text", "token_ids"]
        assert await client.count_tokens("m", "x") == 3
        assert await client.list_models() == [Model("m", "r", 8, 9)]
        with pytest.raises(BadInput):
            await client.count_tokens("m", [1, 2])
        with pytest.raises(BadInput):
            await client.count_tokens("m", [Message("user", "x"), 3])  # type: ignore[list-item]


async def test_leaving_the_loop_cancels_the_call() -> None:
    router = Router()
    router.endless = True
    async with serving(router) as (address,), MeshfireClient(address) as client:
        stream = client.generate("m", "x")
        async for event in stream:
            if isinstance(event, Delta):
                break
        await stream.aclose()
        async with asyncio.timeout(5):
            await router.cancelled.wait()


async def test_a_refusal_arrives_as_the_error_that_the_router_raised() -> None:
    async with serving(Router(QueueFull("full", retry_after_s=2.5))) as (address,), MeshfireClient(address) as client:
        with pytest.raises(QueueFull) as caught:
            async for _ in client.generate("m", "x"):
                pass
        assert caught.value.retry_after_s == 2.5


async def test_routers_are_found_in_a_registry_and_one_that_drains_is_passed_over() -> None:
    registry = MemoryRegistry()
    draining, working = Router(Draining("stops")), Router()
    async with serving(draining, working) as addresses:
        for number, address in enumerate(addresses):
            await registry.register(Instance("meshfire-router", f"r{number}", address))
        async with MeshfireClient(registry) as client:
            for _ in range(2):
                events = [event async for event in client.generate("m", "x")]
                assert isinstance(events[-1], Finished)
                assert await client.count_tokens("m", "x") == 3
    assert len(working.requests) == 4
    assert draining.requests


async def test_a_model_without_workers_is_not_asked_for_elsewhere() -> None:
    registry = MemoryRegistry()
    routers = Router(NoWorker("none")), Router(NoWorker("none"))
    async with serving(*routers) as addresses:
        for number, address in enumerate(addresses):
            await registry.register(Instance("meshfire-router", f"r{number}", address))
        async with MeshfireClient(registry) as client:
            with pytest.raises(NoWorker):
                async for _ in client.generate("m", "x"):
                    pass
    assert sum(len(router.requests) for router in routers) == 1


async def test_without_any_router_in_discovery_a_call_says_so_after_a_while() -> None:
    async with MeshfireClient(MemoryRegistry(), wait_s=0.05) as client:
        with pytest.raises(NoWorker, match="no router"):
            await client.list_models()


async def test_a_client_outside_its_context_is_a_defect() -> None:
    with pytest.raises(InternalError, match="async with"):
        await MeshfireClient("127.0.0.1:1").list_models()


def test_a_number_that_fits_no_field_is_bad_input() -> None:
    with pytest.raises(BadInput):
        sampling_to(Sampling(max_tokens=2**40))
