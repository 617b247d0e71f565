"""What the client sees when the router refuses, fails, vanishes, or when the client itself does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import httpx
import pytest

from meshfire import errors
from meshfire.api.router.v1 import inference_service_pb2 as pb
from meshfire.discovery.base import Instance
from meshfire.discovery.memory import MemoryRegistry, MemorySpace
from meshfire.rpc.channels import ChannelPool
from meshfire.runtime.serve import running
from meshfire.telemetry.setup import configure
from services.gateway.routers import Routers
from services.gateway.server import build
from tests.unit.gateway.conftest import Gateway, settings
from tests.unit.gateway.fake_router import (
    MODEL,
    FakeRouter,
    delta,
    endless,
    failing,
    finished,
    saying,
    serve,
    silent,
    started,
)
from tests.unit.gateway.test_bad_input import error_of
from tests.unit.gateway.test_chat import events

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
CASES = [
    (errors.BadInput("no", field="sampling.logit_bias[99]"), 400, "invalid_request_error", "bad_input", "logit_bias"),
    (errors.InvalidPrompt("no", field="chat.messages[0].role"), 400, None, "invalid_prompt", "messages[0].role"),
    (errors.PromptTooLong("no", field="chat"), 400, None, "context_length_exceeded", "messages"),
    (errors.UnknownModel("no", field="model"), 404, "invalid_request_error", "model_not_found", "model"),
    (errors.ModelMismatch("no"), 400, None, "model_mismatch", None),
    (errors.TestHooksOff("no"), 403, "invalid_request_error", "test_hooks_off", None),
    (errors.QueueFull("no", retry_after_s=2.2), 429, "rate_limit_error", "queue_full", None),
    (errors.NoWorker("no"), 503, "server_error", "no_worker", None),
    (errors.KvCorrupt("no"), 503, "server_error", "kv_corrupt", None),
    (errors.DeadlineExceeded("no"), 504, "server_error", "deadline_exceeded", None),
    (RuntimeError("secret"), 500, "server_error", "internal_error", None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", [(), (started(),)])
@pytest.mark.parametrize(("error", "status", "kind", "code", "param"), CASES, ids=lambda x: type(x).__name__)
async def test_before_the_first_token_an_error_has_its_own_status(
    gateway: Gateway,
    error: Exception,
    status: int,
    kind: str | None,
    code: str,
    param: str | None,
    before: tuple[pb.GenerateResponse, ...],
    stream: bool,
) -> None:
    gateway.router.behave = failing(error, *before)
    response = await gateway.post(CHAT, BODY | {"stream": stream})
    told = error_of(response)
    assert response.status_code == status
    assert (told["code"], told["param"]) == (code, param)
    assert kind is None or told["type"] == kind
    assert "secret" not in response.text
    assert response.headers["x-request-id"]


async def test_overload_says_when_to_come_back_in_whole_seconds(gateway: Gateway) -> None:
    gateway.router.behave = failing(errors.QueueFull("no", retry_after_s=2.2))
    assert (await gateway.post(CHAT, BODY)).headers["retry-after"] == "3"


async def test_a_wrong_token_id_is_named_in_the_completion_prompt(gateway: Gateway) -> None:
    gateway.router.behave = failing(errors.BadInput("no", field="token_ids.ids[1]"))
    response = await gateway.post("/v1/completions", {"model": MODEL, "prompt": [1, 999]})
    assert error_of(response)["param"] == "prompt[1]"


async def test_after_the_first_token_an_error_is_an_event_and_then_done(gateway: Gateway) -> None:
    gateway.router.behave = failing(errors.WorkerLost("gone"), started(), delta("a", [1]))
    response = await gateway.post(CHAT, BODY | {"stream": True})
    assert response.status_code == 200
    *chunks, last = events(response)
    assert chunks[-1]["choices"][0]["delta"] == {"content": "a"}
    assert last["error"]["code"] == "worker_lost"


async def test_one_failed_output_of_several_fails_the_answer_and_ends_the_others(gateway: Gateway) -> None:
    async def behave(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        if request.sampling.seed == 1:
            raise errors.QueueFull("no")
        async for response in endless(request, context):
            yield response

    gateway.router.behave = behave
    for stream in (False, True):
        response = await gateway.post(CHAT, BODY | {"n": 3, "seed": 0, "stream": stream})
        assert response.status_code == 429
    await gateway.router.idle()


async def test_a_call_that_ends_without_its_last_message_is_an_error(gateway: Gateway) -> None:
    gateway.router.behave = saying(started(), delta("a", [1]))
    assert (await gateway.post(CHAT, BODY)).status_code == 503


async def test_a_call_that_the_router_cancels_is_an_error_and_no_hang(gateway: Gateway) -> None:
    async def behave(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        yield started()
        await context.abort(grpc.StatusCode.CANCELLED, "drained")

    gateway.router.behave = behave
    response = await gateway.post(CHAT, BODY)
    assert (response.status_code, error_of(response)["code"]) == (503, "cancelled")


async def test_a_channel_closed_under_a_call_is_an_error_and_no_hang() -> None:
    router, space, channels = FakeRouter(behave=silent), MemorySpace(), ChannelPool()
    server, address = await serve(router)
    space.put_instance(Instance("meshfire-router", "router-0", address))
    async with asyncio.TaskGroup() as group:
        routers = Routers(MemoryRegistry(space), channels)
        watch = group.create_task(routers.watch())
        while not routers.num_known:
            await asyncio.sleep(0)
        async with aclosing(routers.generate(pb.GenerateRequest(model=MODEL), (), 20)) as responses:
            assert (await anext(responses)).HasField("started")
            await channels.drop(address)
            with pytest.raises(errors.Unavailable, match="closed"):
                await anext(responses)
        watch.cancel()
    await server.stop(None)


@pytest.mark.parametrize("behave", [endless, silent])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_cancels_every_call(gateway: Gateway, behave: Any, stream: bool, n: int) -> None:
    gateway.router.behave = behave
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as client:
        post = asyncio.ensure_future(client.post(CHAT, json=BODY | {"stream": stream, "n": n}))
        while gateway.router.num_running < n:
            await asyncio.sleep(0.01)
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)
    await gateway.router.idle()
    assert gateway.router.num_cancelled == n
    assert b'http_response_status_code="499"' in gateway.telemetry.prometheus_text()


async def test_a_client_that_leaves_amid_its_body_leaves_nothing(gateway: Gateway) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{".encode())
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await gateway.post(CHAT, BODY)).status_code == 200


async def test_a_client_that_closes_after_done_had_a_success(gateway: Gateway) -> None:
    before = _count(gateway, "200")
    async with gateway.client.stream("POST", CHAT, json=BODY | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                break
    assert (await gateway.post(CHAT, BODY)).status_code == 200
    assert _count(gateway, "200") == before + 2


async def test_many_streams_at_once_keep_apart(gateway: Gateway) -> None:
    async def own(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        word = request.chat.messages[0].content
        yield started(request_id=word)
        for index in range(20):
            yield delta(word, [index])
            await asyncio.sleep(0)
        yield finished(20)

    gateway.router.behave = own

    async def ask(word: str) -> str:
        body = {"model": MODEL, "messages": [{"role": "user", "content": word}], "stream": True}
        chunks = events(await gateway.post(CHAT, body))
        assert {one["id"] for one in chunks} == {f"chatcmpl-{word}"}
        return "".join(one["choices"][0]["delta"].get("content", "") for one in chunks)

    words = [f"w{index};" for index in range(30)]
    assert await asyncio.gather(*map(ask, words)) == [word * 20 for word in words]


async def test_the_deadline_of_a_request_is_its_calls_deadline() -> None:
    async with _gateway(FakeRouter(behave=silent), request_timeout_s=0.2) as (client, _):
        response = await client.post(CHAT, json=BODY)
        assert (response.status_code, error_of(response)["code"]) == (504, "deadline_exceeded")


async def test_routers_take_turns_and_a_dead_one_is_stepped_over() -> None:
    first, second = FakeRouter(), FakeRouter()
    async with _gateway(first, second) as (client, _):
        for _ in range(4):
            assert (await client.post(CHAT, json=BODY)).status_code == 200
        assert (len(first.requests), len(second.requests)) == (2, 2)
        first.behave = failing(errors.Draining("stopping"))
        for stream in (False, True, False, True):
            assert (await client.post(CHAT, json=BODY | {"stream": stream})).status_code == 200
        assert len(second.requests) == 2 + 4


async def test_a_router_that_was_heard_is_not_replaced_by_another() -> None:
    first, second = FakeRouter(), FakeRouter()
    for router in (first, second):
        router.behave = failing(errors.WorkerLost("gone"), started(), delta("a", [1]))
    async with _gateway(first, second) as (client, _):
        assert (await client.post(CHAT, json=BODY)).status_code == 503
        assert len(first.requests) + len(second.requests) == 1


async def test_without_a_router_it_starts_and_says_what_is_missing() -> None:
    async with _gateway() as (client, space):
        health = await client.get("/healthz")
        assert (health.status_code, health.json()["status"]) == (503, "unavailable")
        assert "router" in health.json()["missing"]
        response = await client.post(CHAT, json=BODY)
        assert (response.status_code, error_of(response)["code"]) == (503, "unavailable")
        assert response.headers["retry-after"] == "1"
        assert (await client.get("/v1/models")).status_code == 503
        server, address = await serve(FakeRouter())
        space.put_instance(Instance("meshfire-router", "late", address))
        while (await client.get("/healthz")).status_code != 200:
            await asyncio.sleep(0.01)
        assert (await client.post(CHAT, json=BODY)).status_code == 200
        await server.stop(None)


async def test_healthz_needs_a_model(gateway: Gateway) -> None:
    assert (await gateway.client.get("/healthz")).json() == {"status": "ok", "routers": 1, "models": [MODEL]}
    gateway.router.models = ()
    response = await gateway.client.get("/healthz")
    assert response.status_code == 503
    assert response.json()["missing"].startswith("model")


async def test_models_are_listed_and_found_by_their_slashed_name(gateway: Gateway) -> None:
    listing = (await gateway.client.get("/v1/models")).json()
    assert listing["object"] == "list"
    (model,) = listing["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", 64)
    for path in (f"/v1/models/{MODEL}", "/v1/models/%40cf%2Ftest%2Ftiny"):
        assert (await gateway.client.get(path)).json() == model
    missing = await gateway.client.get("/v1/models/other")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "model_not_found")


async def test_metrics_are_prometheus_text(gateway: Gateway) -> None:
    await gateway.post(CHAT, BODY)
    response = await gateway.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert "http_server_request_duration_seconds_count" in response.text
    assert "http_server_active_requests" in response.text


async def test_a_drain_lets_a_running_stream_end() -> None:
    go_on = asyncio.Event()

    async def behave(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        yield started()
        yield delta("a", [1])
        await go_on.wait()
        yield delta("b", [2])
        yield finished(2)

    stopping = asyncio.Event()
    text = ""
    async with httpx.AsyncClient(timeout=20, trust_env=False) as client:
        async with asyncio.TaskGroup() as group:
            url = asyncio.get_running_loop().create_future()
            life = group.create_task(_live_until(stopping, url, FakeRouter(behave=behave)))
            async with client.stream("POST", f"{await url}{CHAT}", json=BODY | {"stream": True}) as response:
                async for line in response.aiter_lines():
                    text += line
                    if '"content":"a"' in line:
                        stopping.set()
                        await asyncio.sleep(0.05)
                        assert not life.done()
                        go_on.set()
    assert '"content":"b"' in text
    assert text.endswith("data: [DONE]")


async def _live_until(stopping: asyncio.Event, url: asyncio.Future[str], router: FakeRouter) -> None:
    async with _gateway(router) as (client, _):
        url.set_result(str(client.base_url).rstrip("/"))
        await stopping.wait()


def _count(gateway: Gateway, status: str) -> float:
    """Finished chat requests with this status, by the gateway's own metric."""
    total = 0.0
    for line in gateway.telemetry.prometheus_text().decode().splitlines():
        if line.startswith("http_server_request_duration_seconds_count") and f'status_code="{status}"' in line:
            total += float(line.rsplit(" ", 1)[1])
    return total


class _gateway:
    """A gateway of its own before these routers."""

    def __init__(self, *routers: FakeRouter, **more: object) -> None:
        self._routers = routers
        self._more = more

    async def __aenter__(self) -> tuple[httpx.AsyncClient, MemorySpace]:
        space = MemorySpace()
        self._servers = []
        for index, router in enumerate(self._routers):
            server, address = await serve(router)
            self._servers.append(server)
            space.put_instance(Instance("meshfire-router", f"router-{index}", address))
        telemetry = configure("gateway", "gateway-1")
        self._running = running(
            "gateway", build, settings(**self._more), registry=MemoryRegistry(space), telemetry=telemetry
        )
        await self._running.__aenter__()
        (instance,) = space.instances_of("meshfire-gateway")
        self._client = httpx.AsyncClient(
            base_url=f"http://{instance.metadata['http_address']}", timeout=20, trust_env=False
        )
        return self._client, space

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()
        await self._running.__aexit__(None, None, None)
        for server in self._servers:
            await server.stop(None)
