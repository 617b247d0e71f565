"""A router over real sockets: fake workers on the real WorkService, a fake tokenizer, the real client."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from meshfire import errors
from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.client import Delta, Event, Finished, MeshfireClient, Message, Sampling, Started
from meshfire.discovery.memory import MemorySpace
from tests.unit.router.fakes import END, FakeWorker, TestMesh, TokenizerProcess, story, token_at, until


@dataclass
class Rig:
    """One router, one tokenizer, one worker of each kind, one client."""

    mesh: TestMesh
    prefill: FakeWorker
    decode: FakeWorker
    tokenizer: TokenizerProcess
    client: MeshfireClient
    address: str


@asynccontextmanager
async def rig(
    router: dict[str, Any] | None = None, *, exporter: SpanExporter | None = None, **decode: Any
) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        mesh = TestMesh(MemorySpace(), exporter)
        tokenizer = await stack.enter_async_context(mesh.tokenizer())
        served = await stack.enter_async_context(mesh.router(**(router or {})))
        prefill = await stack.enter_async_context(mesh.prefill().up())
        decoder = await stack.enter_async_context(mesh.decode(**decode).up())
        client = await stack.enter_async_context(MeshfireClient(served.address))
        async with asyncio.timeout(5):
            while not await client.list_models():
                await asyncio.sleep(0.01)
        yield Rig(mesh, prefill, decoder, tokenizer, client, served.address)


async def collect(stream: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in stream]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def ids_of(events: list[Event]) -> list[int]:
    return [token_id for event in events if isinstance(event, Delta) for token_id in event.token_ids]


def waiting_requests(one: Rig) -> int:
    """As the router's own gauge of waiting leases tells."""
    lines = one.mesh.telemetry.prometheus_text().decode().splitlines()
    found = [line for line in lines if line.startswith("meshfire_router_requests_queued") and '"prefill"' in line]
    return round(sum(float(line.rsplit(" ", 1)[1]) for line in found))


def finish_of(events: list[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    assert sum(isinstance(event, Finished) for event in events) == 1
    return events[-1]


class TestHappyPath:
    async def test_a_chat_is_answered_with_started_deltas_and_one_finished(self) -> None:
        async with rig(num_output=30) as one:
            prompt = [Message("user", "tell me a story")]
            events = await collect(one.client.generate("tiny", prompt, return_prompt_token_ids=True))
        started, finished = events[0], finish_of(events)
        assert isinstance(started, Started)
        assert started.num_prompt_tokens == len(started.prompt_token_ids) == len("<user>tell me a story")
        assert len(started.trace_id) == 32
        assert text_of(events) == story(30)
        assert ids_of(events) == [token_at(index) for index in range(30)]
        assert (finished.finish_reason, finished.stop_token_id, finished.stop_hit) == ("stop", END, None)
        assert finished.usage.num_output_tokens == 31
        assert finished.usage.num_cached_tokens == started.num_prompt_tokens // 2
        assert finished.receipt.prefill_worker_id == "prefill-0"
        assert finished.receipt.decode_worker_id == "decode-0"
        assert finished.receipt.num_failovers == 0
        assert finished.receipt.kv_bytes == 777

    async def test_an_output_ends_at_max_tokens(self) -> None:
        async with rig() as one:
            events = await collect(one.client.generate("tiny", "hello", Sampling(max_tokens=7)))
        finished = finish_of(events)
        assert (finished.finish_reason, finished.stop_token_id) == ("length", None)
        assert finished.usage.num_output_tokens == 7
        assert text_of(events) == story(7)

    async def test_max_tokens_is_what_the_context_window_leaves(self) -> None:
        async with rig() as one:
            events = await collect(one.client.generate("tiny", list(range(200)), Sampling(max_tokens=10_000)))
        assert finish_of(events).usage.num_output_tokens == 512 - 200

    async def test_workers_get_seed_and_prompt_as_the_client_was_told(self) -> None:
        async with rig() as one:
            events = await collect(one.client.generate("tiny", [5, 6, 7], Sampling(max_tokens=2), cache_salt="s"))
            started = events[0]
            assert isinstance(started, Started)
            decode = one.decode.leases[0].decode
            assert list(one.prefill.leases[0].prefill.token_ids) == list(decode.token_ids) == [5, 6, 7]
            assert one.prefill.leases[0].prefill.cache_salt == decode.cache_salt == "s"
            assert decode.sampling.seed == started.seed
            assert decode.sampling.max_tokens == 2
            assert decode.num_prompt_tokens == 3
            assert decode.kv_address == "prefill-0.test:1"

    async def test_the_grant_names_the_reader_and_comes_with_the_offers_lease_id(self) -> None:
        async with rig() as one:
            await collect(one.client.generate("tiny", "x", Sampling(max_tokens=1)))
            await until(lambda: one.prefill.grants)
            grant = one.prefill.grants[0]
            assert (grant.reader_id, grant.epoch) == ("decode-0", 1)
            assert grant.kv_lease_id == one.decode.leases[0].decode.kv_lease_id

    async def test_a_stop_text_ends_the_output_and_cancels_decode(self) -> None:
        async with rig() as one:
            events = await collect(one.client.generate("tiny", "x", Sampling(stop=["fox"])))
            finished = finish_of(events)
            assert text_of(events) == "The quick brown "
            assert (finished.finish_reason, finished.stop_hit) == ("stop", "fox")
            assert bytes(ids_of(events)) == b"The quick brown fox"
            assert finished.usage.num_output_tokens == len("The quick brown fox")
            await until(lambda: one.decode.cancels and not one.decode.running)

    async def test_logprobs_come_with_the_bytes_of_their_tokens(self) -> None:
        async with rig(logprobs=True) as one:
            events = await collect(one.client.generate("tiny", "x", Sampling(max_tokens=3, num_logprobs=2)))
        logprobs = [entry for event in events if isinstance(event, Delta) for entry in event.logprobs]
        assert [entry.piece for entry in logprobs] == [b"T", b"h", b"e"]
        assert logprobs[1].top_pieces == (b"h", b"A")
        assert logprobs[1].top_ids == (ord("h"), 65)

    async def test_tokens_are_counted_without_any_lease(self) -> None:
        async with rig() as one:
            assert await one.client.count_tokens("tiny", "hello") == 5
            assert one.prefill.leases == []

    async def test_two_models_are_served_side_by_side(self) -> None:
        async with AsyncExitStack() as stack:
            mesh = TestMesh(MemorySpace())
            await stack.enter_async_context(mesh.tokenizer("tokenizer-a", "alpha"))
            await stack.enter_async_context(mesh.tokenizer("tokenizer-b", "beta"))
            served = await stack.enter_async_context(mesh.router())
            workers = {
                name: (
                    await stack.enter_async_context(mesh.prefill(f"prefill-{name}", model=name).up()),
                    await stack.enter_async_context(mesh.decode(f"decode-{name}", model=name, num_output=n).up()),
                )
                for name, n in (("alpha", 3), ("beta", 5))
            }
            client = await stack.enter_async_context(MeshfireClient(served.address))
            assert [model.name for model in await client.list_models()] == ["alpha", "beta"]
            async with asyncio.TaskGroup() as group:
                calls = {n: group.create_task(collect(client.generate(n, "x"))) for n in workers for _ in range(3)}
            for name, task in calls.items():
                assert finish_of(task.result()).receipt.decode_worker_id == f"decode-{name}"
            assert {lease.decode.sampling.max_tokens for lease in workers["alpha"][1].leases} == {511}

    async def test_two_routers_share_one_worker(self) -> None:
        async with AsyncExitStack() as stack:
            mesh = TestMesh(MemorySpace())
            await stack.enter_async_context(mesh.tokenizer())
            addresses = [
                (await stack.enter_async_context(mesh.router(f"router-{index}"))).address for index in range(2)
            ]
            await stack.enter_async_context(mesh.prefill().up())
            decode = await stack.enter_async_context(mesh.decode(num_output=20).up())
            clients = [await stack.enter_async_context(MeshfireClient(address)) for address in addresses]
            for client in clients:
                async with asyncio.timeout(5):
                    while not await client.list_models():
                        await asyncio.sleep(0.01)
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(collect(c.generate("tiny", "x"))) for c in clients for _ in range(4)]
            assert [text_of(call.result()) for call in calls] == [story(20)] * 8
            assert len(decode.leases) == 8


class TestFailover:
    """Whatever dies, the client sees the same tokens, each once."""

    async def test_a_decode_worker_killed_in_the_middle_is_replaced_without_a_trace_in_the_output(self) -> None:
        async def kill_at_ten(worker: FakeWorker, lease: pb.Lease, index: int) -> None:
            if index == 10 and lease.epoch == 1:
                await worker.kill()
                await asyncio.Event().wait()

        async with rig(num_output=30, gate=lambda *a: kill_at_ten(*a)) as one:
            async with one.mesh.decode("decode-1", num_output=30).up() as other:
                one.decode.num_slots = 9  # most free slots: the doomed one goes first
                one.decode.say_credit()
                await asyncio.sleep(0.05)
                events = await collect(one.client.generate("tiny", "x"))
                assert text_of(events) == story(30)
                assert ids_of(events) == [token_at(index) for index in range(30)]
                finished = finish_of(events)
                assert finished.receipt.num_failovers == 1
                assert finished.receipt.decode_worker_id == "decode-1"
                assert finished.usage.num_output_tokens == 31
                lease = other.leases[0]
                assert lease.epoch == 2
                # what the dead worker had not sent yet is lost with it, and chosen again
                assert 1 <= len(lease.decode.token_ids) <= 11
                assert (b"x" + story(10).encode()).startswith(bytes(lease.decode.token_ids))
                assert lease.decode.num_prompt_tokens == 1
                assert list(one.prefill.leases[1].prefill.token_ids) == list(lease.decode.token_ids)

    @pytest.mark.parametrize("when", ["before the offer", "after the offer"])
    async def test_a_prefill_worker_killed_is_replaced(self, when: str) -> None:
        dead = asyncio.Event()

        async def die(worker: FakeWorker, lease: pb.Lease, index: int) -> None:
            if lease.epoch == 1 and not dead.is_set():
                dead.set()
                await worker.kill()
                await asyncio.Event().wait()

        async def die_unread(worker: FakeWorker, lease: pb.Lease, index: int) -> None:
            """The decode worker, before its first token: its KV's owner goes."""
            if lease.epoch == 1 and not dead.is_set():
                dead.set()
                await one.prefill.kill()
                await asyncio.Event().wait()

        async with rig(num_output=12) as one:
            (one.prefill if when == "before the offer" else one.decode).gate = (
                die if when == "before the offer" else die_unread
            )
            async with one.mesh.prefill("prefill-1", num_slots=1).up():
                one.prefill.num_slots = 9
                one.prefill.say_credit()
                await asyncio.sleep(0.05)
                events = await collect(one.client.generate("tiny", "x"))
                assert text_of(events) == story(12)
                assert finish_of(events).receipt.num_failovers == 1
                assert dead.is_set()

    async def test_a_lease_that_fails_for_a_passing_reason_is_leased_again(self) -> None:
        async def fail_twice(worker: FakeWorker, lease: pb.Lease, index: int) -> None:
            if index == 3 and lease.epoch < 3:
                raise errors.ShardUnavailable("expert shard is away")

        async with rig(num_output=9, gate=fail_twice) as one:
            events = await collect(one.client.generate("tiny", "x"))
            assert text_of(events) == story(9)
            assert finish_of(events).receipt.num_failovers == 2

    async def test_an_error_that_no_worker_can_mend_reaches_the_client_with_its_reason(self) -> None:
        async def fail(worker: FakeWorker, lease: pb.Lease, index: int) -> None:
            if index == 2:
                raise errors.NonFiniteValue("logits are not finite")

        async with rig(gate=fail) as one:
            seen: list[Event] = []
            with pytest.raises(errors.NonFiniteValue, match="not finite"):
                async for event in one.client.generate("tiny", "x"):
                    seen.append(event)
            assert text_of(seen) == story(2)
            assert len(one.decode.leases) == 1

    async def test_messages_of_an_old_epoch_are_dropped(self) -> None:
        async def late(worker: FakeWorker, lease: pb.Lease, index: int) -> None:
            """Fails at index 4 of epoch 1, and then still speaks of it."""
            if index == 4 and lease.epoch == 1:
                (router_id,) = worker.link._streams
                worker.say_failed(router_id, lease, errors.ShardUnavailable("away"))
                for position in (0, 3, 4, 5):
                    worker.say_token(router_id, lease, position, ord("!"))
                await asyncio.Event().wait()

        async with rig(num_output=15, gate=late) as one:
            events = await collect(one.client.generate("tiny", "x"))
            assert text_of(events) == story(15)

    async def test_tokens_that_come_twice_are_delivered_once(self) -> None:
        async def twice(worker: FakeWorker, lease: pb.Lease, index: int) -> None:
            if index:
                (router_id,) = worker.link._streams
                worker.say_token(router_id, lease, index - 1, token_at(index - 1))

        async with rig(num_output=15, gate=twice) as one:
            events = await collect(one.client.generate("tiny", "x"))
            assert text_of(events) == story(15)

    async def test_an_offer_that_cannot_be_read_in_time_is_prefilled_again(self) -> None:
        async with rig(num_output=5, num_slots=0) as one:
            one.prefill.expires_ms = 100
            task = asyncio.ensure_future(collect(one.client.generate("tiny", "x")))
            await until(lambda: len(one.prefill.leases) >= 3)
            one.decode.num_slots = 1
            one.decode.say_credit()
            events = await task
            assert text_of(events) == story(5)
            assert finish_of(events).receipt.num_failovers == 0
            assert one.prefill.cancels, "the owner of an expired offer is told"

    async def test_a_tokenizer_that_dies_in_the_middle_costs_no_character(self) -> None:
        async with rig(num_output=40) as one:
            async with one.mesh.tokenizer("tokenizer-1") as other:
                # whichever of them gets the stream breaks it, and the other one takes over
                servicers = one.tokenizer.servicer, other.servicer
                for servicer in servicers:
                    servicer.break_after = 3
                events = await collect(one.client.generate("tiny", "x", Sampling(stop=["never said"])))
                assert text_of(events) == story(40)
                assert any(servicer.break_after is None for servicer in servicers), "one did break"

    async def test_a_tokenizer_stream_that_breaks_is_reopened_at_the_only_instance(self) -> None:
        async with rig(num_output=40) as one:
            one.tokenizer.servicer.break_after = 2
            events = await collect(one.client.generate("tiny", "x", Sampling(stop=["dog"])))
            assert text_of(events) == story(40)
            assert one.tokenizer.servicer.num_streams == 2


class TestEndings:
    async def test_a_client_that_leaves_frees_the_decode_worker(self) -> None:
        async with rig(gate=lambda w, lease, index: asyncio.sleep(0.005)) as one:
            stream = one.client.generate("tiny", "x")
            async for event in stream:
                if isinstance(event, Delta):
                    break
            await stream.aclose()
            await until(lambda: one.decode.cancels and not one.decode.running)
            assert one.decode.cancels == [(one.decode.leases[0].request_id, 1)]

    async def test_a_client_that_leaves_during_prefill_frees_the_prefill_worker(self) -> None:
        async with rig() as one:
            one.prefill.gate = lambda *_: asyncio.Event().wait()
            task = asyncio.ensure_future(collect(one.client.generate("tiny", "x")))
            await until(lambda: one.prefill.running)
            task.cancel()
            await until(lambda: one.prefill.cancels and not one.prefill.running)

    async def test_a_deadline_ends_the_request_and_frees_the_worker(self) -> None:
        async with rig(gate=lambda *_: asyncio.Event().wait()) as one:
            with pytest.raises(errors.DeadlineExceeded):
                await collect(one.client.generate("tiny", "x", timeout_s=0.4))
            await until(lambda: one.decode.cancels and not one.decode.running)

    async def test_the_routers_own_deadline_bounds_callers_that_set_none(self) -> None:
        async with rig({"default_deadline_s": 0.3}, gate=lambda *_: asyncio.Event().wait()) as one:
            with pytest.raises(errors.DeadlineExceeded, match="deadline passed"):
                await collect(one.client.generate("tiny", "x"))

    async def test_without_any_decode_worker_left_the_error_says_so(self) -> None:
        async def die(worker: FakeWorker, lease: pb.Lease, index: int) -> None:
            if index == 2:
                worker.registry._space.drop_instance("router-0")  # nor does it come back
                await worker.kill()
                await asyncio.Event().wait()

        async with rig({"default_deadline_s": 0.6}, gate=die) as one:
            with pytest.raises(errors.Unavailable) as caught:
                await collect(one.client.generate("tiny", "x"))
            assert caught.value.reason in ("WORKER_LOST", "NO_WORKER")

    async def test_a_full_queue_refuses_with_a_time_to_come_back(self) -> None:
        async with rig({"max_queued_requests": 1}) as one:
            one.prefill.num_slots = 0
            one.prefill.say_credit()
            await asyncio.sleep(0.05)
            waiting = asyncio.ensure_future(collect(one.client.generate("tiny", "x", Sampling(max_tokens=1))))
            await until(lambda: waiting_requests(one) == 1)
            with pytest.raises(errors.QueueFull) as caught:
                await collect(one.client.generate("tiny", "x"))
            assert caught.value.retry_after_s is not None
            assert caught.value.retry_after_s >= 1
            one.prefill.num_slots = 4
            one.prefill.say_credit()
            assert text_of(await waiting) == "T"

    async def test_an_unknown_model_is_refused_at_once(self) -> None:
        async with rig() as one:
            with pytest.raises(errors.UnknownModel) as caught:
                await collect(one.client.generate("missing", "x"))
            assert caught.value.field == "model"
            with pytest.raises(errors.UnknownModel):
                await one.client.count_tokens("missing", "x")

    async def test_a_model_whose_workers_went_away_waits_for_them_and_then_says_so(self) -> None:
        async with AsyncExitStack() as stack:
            mesh = TestMesh(MemorySpace())
            await stack.enter_async_context(mesh.tokenizer())
            served = await stack.enter_async_context(mesh.router(worker_wait_s=0.2))
            client = await stack.enter_async_context(MeshfireClient(served.address))
            await stack.enter_async_context(mesh.prefill().up())
            with pytest.raises(errors.NoWorker, match="no decode worker"):
                await collect(client.generate("tiny", "x"))
            assert await client.list_models() == []
            await stack.enter_async_context(mesh.decode(num_output=3).up())
            assert text_of(await collect(client.generate("tiny", "x"))) == story(3)

    async def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(self) -> None:
        async with rig() as one:
            with pytest.raises(errors.PromptTooLong) as caught:
                await collect(one.client.generate("tiny", "x" * 512))
            assert caught.value.metadata == {"num_prompt_tokens": "512", "context_tokens": "512"}
            assert caught.value.field == "text"

    async def test_bad_input_names_its_field_over_the_wire(self) -> None:
        async with rig() as one:
            with pytest.raises(errors.BadInput) as caught:
                await collect(one.client.generate("tiny", "x", Sampling(temperature=9.0)))
            assert caught.value.field == "sampling.temperature"

    async def test_draining_refuses_new_requests_and_lets_running_ones_finish(self) -> None:
        async with AsyncExitStack() as stack:
            mesh = TestMesh(MemorySpace())
            await stack.enter_async_context(mesh.tokenizer())
            leave = asyncio.Event()
            address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

            async def serve() -> None:
                async with mesh.router(drain_s=5.0) as served:
                    address.set_result(served.address)
                    await leave.wait()

            serving = asyncio.ensure_future(serve())
            client = await stack.enter_async_context(MeshfireClient(await address))
            await stack.enter_async_context(mesh.prefill().up())
            go = asyncio.Event()

            async def hold(worker: FakeWorker, lease: pb.Lease, index: int) -> None:
                if index == 2:
                    await go.wait()

            decode = await stack.enter_async_context(mesh.decode(num_output=6, gate=hold).up())
            running = asyncio.ensure_future(collect(client.generate("tiny", "x")))
            await until(lambda: decode.running)
            leave.set()
            with pytest.raises(errors.Draining):
                async with asyncio.timeout(3):
                    while True:
                        await collect(client.generate("tiny", "x", timeout_s=0.1))
                        await asyncio.sleep(0.01)
            go.set()
            assert text_of(await running) == story(6)
            await serving


class TestRecords:
    async def test_one_trace_covers_the_request_and_hangs_below_the_callers(self) -> None:
        exporter = InMemorySpanExporter()
        trace_id, caller = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
        async with rig(exporter=exporter, num_output=5) as one:
            metadata = {"traceparent": f"00-{trace_id}-{caller}-01"}
            events = await collect(one.client.generate("tiny", "prompt", metadata=metadata))
            started = events[0]
            assert isinstance(started, Started)
            assert started.trace_id == trace_id
            lease, parents = one.decode.leases[0], one.tokenizer.servicer.parents
            await until(lambda: one.mesh.telemetry.flush() or len(exporter.get_finished_spans()) == 4)
        spans = {span.name: span for span in exporter.get_finished_spans()}
        assert spans.keys() == {"router.generate", "router.tokenize", "router.queue.prefill", "router.queue.decode"}
        root = spans.pop("router.generate")
        assert root.parent is not None
        assert f"{root.parent.span_id:016x}" == caller
        assert all(span.parent and span.parent.span_id == root.context.span_id for span in spans.values())
        assert all(f"{span.context.trace_id:032x}" == trace_id for span in (root, *spans.values()))
        assert lease.traceparent == f"00-{trace_id}-{root.context.span_id:016x}-01"
        assert parents == [f"00-{trace_id}-{spans['router.tokenize'].context.span_id:016x}-01"]
        assert root.attributes is not None
        assert root.attributes["meshfire.tokens.prompt"] == len("prompt")
        assert root.attributes["meshfire.tokens.output"] == 6  # as in usage: five, and the end token
        assert root.attributes["meshfire.kv.bytes"] == 777
        assert root.attributes["meshfire.worker.id"] == ("prefill-0", "decode-0")
        queue = spans["router.queue.decode"].attributes
        assert queue is not None
        assert (queue["meshfire.worker.id"], queue["meshfire.epoch"]) == ("decode-0", 1)

    async def test_metrics_tell_times_tokens_and_outcomes(self) -> None:
        async with rig(num_output=5) as one:
            await collect(one.client.generate("tiny", "prompt"))
            with pytest.raises(errors.BadInput):
                await collect(one.client.generate("tiny", "x", Sampling(top_p=7.0)))
            text = one.mesh.telemetry.prometheus_text().decode()
        lines = [line for line in text.splitlines() if not line.startswith("#")]

        def value(name: str, label: str) -> float:
            (line,) = [line for line in lines if line.startswith(name + "{") and label in line]
            return float(line.rsplit(" ", 1)[1])

        assert value("gen_ai_server_time_to_first_token_seconds_count", "tiny") == 1
        assert value("gen_ai_server_time_per_output_token_seconds_count", "tiny") == 1
        assert value("gen_ai_server_request_duration_seconds_count", '"stop"') == 1
        assert value("gen_ai_server_request_duration_seconds_count", '"BAD_INPUT"') == 1
        assert value("meshfire_router_requests_queued", '"prefill"') == 0
        assert sum(float(line.rsplit(" ", 1)[1]) for line in lines if "requests_active" in line) == 0
        assert any("refused" in line and "BAD_INPUT" in line for line in lines)


class TestHooks:
    SCRIPT = base64.b64encode(json.dumps({"pieces": ["Hi ", "there"], "end": "eos"}).encode()).decode()

    async def test_a_script_replaces_the_choice_of_tokens(self) -> None:
        async with rig({"test_hooks": True}) as one:
            events = await collect(one.client.generate("tiny", "x", metadata={"x-meshfire-script": self.SCRIPT}))
            assert text_of(events) == "Hi there"
            assert finish_of(events).stop_token_id == END
            assert one.decode.leases[0].decode.script_ends_with_eos

    async def test_a_fault_travels_with_the_first_epoch_only(self) -> None:
        async def fail_once(worker: FakeWorker, lease: pb.Lease, index: int) -> None:
            if lease.fault and index == 1:
                raise errors.ShardUnavailable("rehearsed")

        async with rig({"test_hooks": True}, num_output=4, gate=fail_once) as one:
            fault = "decode:kill@token=1"
            events = await collect(one.client.generate("tiny", "x", metadata={"x-meshfire-fault": fault}))
            assert text_of(events) == story(4)
            assert [lease.fault for lease in one.decode.leases] == [fault, ""]
            assert [lease.fault for lease in one.prefill.leases] == [fault, ""]

    @pytest.mark.parametrize("header", ["x-meshfire-script", "x-meshfire-fault"])
    async def test_hooks_are_refused_where_they_are_off(self, header: str) -> None:
        async with rig() as one:
            with pytest.raises(errors.TestHooksOff):
                await collect(one.client.generate("tiny", "x", metadata={header: self.SCRIPT}))

    async def test_a_script_that_the_tokenizer_refuses_names_the_header(self) -> None:
        async with rig({"test_hooks": True}) as one:
            script = base64.b64encode(b'{"nothing": 1}').decode()
            with pytest.raises(errors.BadInput) as caught:
                await collect(one.client.generate("tiny", "x", metadata={"x-meshfire-script": script}))
            assert caught.value.field == "x-meshfire-script"
