"""The prompt as part of the answer: the life of a request that wants its log-probabilities, and what is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.client import Delta, Event, Finished, MeshfireClient, Message, PromptPart, Sampling
from meshfire.discovery.memory import MemorySpace
from meshfire.errors import BadInput, DataLoss, WorkerLost
from services.router import lifecycle_events as ev
from services.router.lifecycle import Life, Limits, Phase, apply, begin
from services.router.lifecycle_events import Stage
from services.router.output import FinishReason, Logprobs
from tests.unit.router.fakes import FakeWorker, TestMesh, story

OFFER = ev.Offer("kv", 10, 4, 100, 30_000)


def scores(first: int, stop: int) -> tuple[Logprobs, ...]:
    """Each token of the prompt has a number of its own."""
    return tuple(Logprobs(-float(index)) for index in range(first, stop))


def prefilling(num_scored: int, max_tokens: int = 5) -> Life:
    life, _ = begin(Limits(max_tokens, num_scored=num_scored))
    return apply(life, ev.Placed("p"))[0]


class TestLife:
    def test_scores_are_kept_and_then_the_offer_counts(self) -> None:
        life, actions = apply(prefilling(9), ev.PromptScored("p", 1, 1, scores(1, 5)))
        assert actions == (ev.KeepScores(scores(1, 5)),)
        life, actions = apply(life, ev.PromptScored("p", 1, 5, scores(5, 10)))
        assert actions == (ev.KeepScores(scores(5, 10)),)
        life, actions = apply(life, ev.Offered("p", 1, OFFER))
        assert (life.phase, actions[0]) == (Phase.QUEUED_DECODE, ev.Enqueue(Stage.DECODE, 1))

    @given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), max_size=12))
    def test_whatever_comes_twice_or_overlaps_is_kept_once_and_in_order(self, parts: list[tuple[int, int]]) -> None:
        """Epochs that break off anywhere: each begins again at token 1."""
        life, kept = prefilling(9), []
        for first, length in [*parts, (1, 12)]:
            life, actions = apply(life, ev.PromptScored("p", life.epoch, first, scores(first, first + length)))
            kept += [one for action in actions if isinstance(action, ev.KeepScores) for one in action.logprobs]
            if life.phase is Phase.PAUSED:
                life, _ = apply(life, ev.RetryDue(life.epoch))
            life, _ = apply(life, ev.Placed("p"))
        assert kept == list(scores(1, 10))[: len(kept)]
        assert len(kept) == life.num_scored

    @pytest.mark.parametrize("event", [ev.PromptScored("p", 1, 2, scores(2, 4)), ev.Offered("p", 1, OFFER)])
    def test_a_worker_that_leaves_scores_out_is_replaced(self, event: ev.Event) -> None:
        """One of an older version that does not know the field, for example."""
        life, actions = apply(prefilling(9), event)
        assert (life.epoch, life.phase, life.avoid) == (2, Phase.QUEUED_PREFILL, "p")
        assert isinstance(life.last_error, DataLoss)
        assert ev.CancelLease("p", 1) in actions

    def test_scores_of_an_older_epoch_or_another_worker_are_old_news(self) -> None:
        life, _ = apply(prefilling(9), ev.WorkerGone("p", WorkerLost("lost")))
        life, _ = apply(life, ev.Placed("q"))
        for stale in (ev.PromptScored("q", 1, 1, scores(1, 3)), ev.PromptScored("p", 2, 1, scores(1, 3))):
            assert apply(life, stale) == (life, ())

    def test_the_offer_ends_a_request_without_an_output_and_is_withdrawn(self) -> None:
        life, actions = apply(prefilling(0, max_tokens=0), ev.Offered("p", 1, OFFER))
        assert life.phase is Phase.FINISHED
        ending = ev.Ending(FinishReason.LENGTH, kv_bytes=0)
        assert actions == (ev.WatchOffer(1, OFFER.expires_ms), ev.CancelLease("p", 1), ev.End(ending))
        assert life.offer == OFFER


# --- over real sockets ------------------------------------------------------------------------------------------------


class Scoring(FakeWorker):
    """A prefill worker that tells scores: token i has -i/8, best of all a token 65. `breaks` after one part, once."""

    breaks: bool = False

    async def _prefill(self, router_id: str, lease: pb.Lease) -> None:
        ids = list(lease.prefill.token_ids)
        if lease.prefill.HasField("num_prompt_logprobs"):
            num_top = lease.prefill.num_prompt_logprobs
            for first in range(1, len(ids), 3):
                part = pb.PromptLogprobs(request_id=lease.request_id, epoch=lease.epoch, first_index=first)
                for index in range(first, min(first + 3, len(ids))):
                    part.logprobs.add(logprob=-index / 8, top_ids=[65] * num_top, top_logprobs=[-0.125] * num_top)
                self.link.send(router_id, pb.WorkRequest(prompt_logprobs=part))
                if self.breaks:
                    self.breaks = False
                    raise WorkerLost("broken on purpose")
        await super()._prefill(router_id, lease)


@asynccontextmanager
async def rig(*, breaks: bool = False) -> AsyncIterator[tuple[MeshfireClient, Scoring, FakeWorker]]:
    async with AsyncExitStack() as stack:
        mesh = TestMesh(MemorySpace())
        await stack.enter_async_context(mesh.tokenizer())
        served = await stack.enter_async_context(mesh.router())
        plain = mesh.prefill()
        prefill = Scoring(plain.registry, plain.role, plain.worker_id)
        prefill.breaks = breaks
        await stack.enter_async_context(prefill.up())
        decode = await stack.enter_async_context(mesh.decode().up())
        yield await stack.enter_async_context(MeshfireClient(served.address)), prefill, decode


async def ask(client: MeshfireClient, prompt: object, *, echo: bool = False, **sampling: object) -> list[Event]:
    asked = Sampling(**sampling)  # type: ignore[arg-type]
    return [event async for event in client.generate("tiny", prompt, asked, echo=echo)]  # type: ignore[arg-type]


def parts_of(events: list[Event]) -> list[PromptPart]:
    return [event for event in events if isinstance(event, PromptPart)]


@pytest.mark.parametrize("breaks", [False, True])
async def test_text_ids_scores_and_bytes_of_the_prompt_come_before_the_output(breaks: bool) -> None:
    async with rig(breaks=breaks) as (client, prefill, _):
        events = await ask(client, "Hello you", echo=True, max_tokens=4, num_prompt_logprobs=1)
    (part,) = parts_of(events)
    assert events.index(part) < next(at for at, one in enumerate(events) if isinstance(one, Delta))
    assert part.text == "Hello you"
    assert bytes(part.token_ids) == b"Hello you"
    assert [one.logprob for one in part.logprobs] == [-index / 8 for index in range(1, 9)]
    assert b"".join(one.piece for one in part.logprobs) == b"ello you"
    assert {(one.top_ids, one.top_logprobs, one.top_pieces) for one in part.logprobs} == {((65,), (-0.125,), (b"A",))}
    assert "".join(one.text for one in events if isinstance(one, Delta)) == story(4)
    assert len(prefill.leases) == 1 + breaks


@pytest.mark.parametrize(("prompt", "text"), [([72, 105], "Hi"), ([Message("user", "Hi")], "<user>Hi"), ("Hi", "Hi")])
async def test_echo_alone_is_the_prompts_text_whatever_it_came_as(prompt: object, text: str) -> None:
    async with rig() as (client, prefill, _):
        events = await ask(client, prompt, echo=True, max_tokens=1)
    assert parts_of(events) == [PromptPart(text, (), ())]
    assert not prefill.leases[0].prefill.HasField("num_prompt_logprobs")


async def test_no_decode_worker_is_asked_for_an_output_of_no_tokens() -> None:
    async with rig() as (client, prefill, decode):
        events = await ask(client, "Hello", echo=True, max_tokens=0)
        finished = events[-1]
        assert isinstance(finished, Finished)
        assert (finished.finish_reason, finished.usage.num_output_tokens) == ("length", 0)
        assert finished.usage.num_cached_tokens == 2, "as the offer says"
        assert (finished.receipt.decode_worker_id, finished.receipt.kv_bytes) == ("", 0)
        assert decode.leases == []
        assert len(prefill.cancels) == 1, "the offer is withdrawn"


async def test_a_prompt_of_one_token_has_no_score_to_wait_for() -> None:
    async with rig() as (client, prefill, _):
        events = await ask(client, [72], max_tokens=0, num_prompt_logprobs=2)
    assert parts_of(events) == [PromptPart("", (72,), ())]
    assert not prefill.leases[0].prefill.HasField("num_prompt_logprobs")


async def test_a_lease_after_the_first_token_asks_for_no_scores_again() -> None:
    async with rig() as (client, prefill, decode):
        broken: list[int] = []

        def gate(worker: FakeWorker, lease: pb.Lease, index: int) -> None:
            if index == 2 and not broken:
                broken.append(index)
                raise WorkerLost("broken on purpose")

        decode.gate = gate
        events = await ask(client, "Hello", max_tokens=4, num_prompt_logprobs=0)
        asked = [lease.prefill.HasField("num_prompt_logprobs") for lease in prefill.leases]
    assert asked == [True, False]
    assert len(parts_of(events)) == 1
    assert "".join(one.text for one in events if isinstance(one, Delta)) == story(4)


async def test_no_output_and_no_prompt_is_no_request() -> None:
    async with rig() as (client, _, _):
        with pytest.raises(BadInput) as caught:
            await ask(client, "Hello", max_tokens=0)
    assert caught.value.field == "sampling.max_tokens"


def test_a_life_without_scores_is_as_before() -> None:
    life = prefilling(0)
    assert apply(life, ev.Offered("p", 1, OFFER))[0].phase is Phase.QUEUED_DECODE
    assert apply(replace(life, phase=Phase.DECODING), ev.PromptScored("p", 1, 1, ()))[1] == ()
