"""Speculation: right guesses save steps, and no guess, right or wrong, changes anything else."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshfire.kv.hashing import chain_hashes
from services.decode.drafting import Drafter, DraftPace, PromptLookup
from services.decode.speculation import Speculation
from tests.unit.decode.conftest import StartWorker, Worker
from tests.unit.decode.fakes import END_ID, VOCAB_SIZE, P, continuation

PROMPT = [3, 1, 4, 1, 5]
LOOKUP = Speculation.named("prompt-lookup", 4)


class Wild:
    """Guesses anything, or what a text without sampling would say, or nothing."""

    def __init__(self) -> None:
        self._rng = random.Random(6)

    def draft(self, token_ids: Sequence[int], max_tokens: int) -> Sequence[int]:
        kind = self._rng.randrange(4)
        if kind == 0:
            return [self._rng.randrange(VOCAB_SIZE) for _ in range(max_tokens)]
        if kind == 1:
            return ()
        right = continuation(token_ids, max_tokens)
        return right if kind == 2 else [*right[:1], *(self._rng.randrange(VOCAB_SIZE) for _ in right[1:])]


def periodic(worker: Worker, period: int = 3) -> None:
    """Token p + 1 follows token p, modulo `period`: with a temperature, most of the time."""

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        peaks = (hidden[:, 0].long() * 7 + hidden[:, 1].long()) % period
        return 3.0 * torch.nn.functional.one_hot(peaks, VOCAB_SIZE).float()

    worker.model.logits = logits  # type: ignore[method-assign]


async def outcome(worker: Worker, **lease: Any) -> tuple[Any, ...]:
    """All that a router hears of one lease, but for how it was cut into messages."""
    worker.lease("a", PROMPT, **lease)
    end = await worker.link.finished("a")
    found = worker.link.progress("a")
    tokens = [token for one in found for token in one.token_ids]
    firsts = [one.first_index for one in found]
    assert firsts == [sum(len(other.token_ids) for other in found[:index]) for index in range(len(found))]
    scores = [(one.logprob, list(one.top_ids)) for part in found for one in part.logprobs]
    hashes = chain_hashes([*PROMPT, *tokens], P, model_revision="rev")
    shared = worker.pool.num_matched(hashes[: (len(PROMPT) + len(tokens)) // P])
    return tokens, scores, end.finish_reason, end.stop_token_id, shared


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.2, "seed": 5},
    {"temperature": 0.9, "seed": 8, "num_logprobs": 3, "top_k": 5},
    {"temperature": 0.7, "seed": 9, "repetition_penalty": 1.1, "frequency_penalty": 0.02, "presence_penalty": 0.1},
    {"temperature": 1.0, "seed": 4, "min_tokens": 17, "stop_token_ids": [0, 1, 2]},
    {"temperature": 1.0, "seed": 4, "stop_token_ids": [11, 12, 13, 14]},
    {"temperature": 5.0, "seed": 2, "logit_bias": {END_ID: 3.0}, "min_tokens": 3},
]


@pytest.mark.parametrize("make_drafter", [PromptLookup, Wild])
@pytest.mark.parametrize("repetitive", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
async def test_nothing_but_the_number_of_steps_depends_on_guesses(
    start_worker: StartWorker, make_drafter: Callable[[], Drafter], repetitive: bool, sampling: dict[str, Any]
) -> None:
    found = []
    for speculation in (Speculation(), Speculation(make_drafter, 5)):
        async with start_worker(speculation=speculation) as worker:
            if repetitive:
                periodic(worker)
            told = await outcome(worker, max_tokens=37, sampling=sampling)
            found.append(told)
            await worker.until_idle()
    (tokens, *plain, _), (guessed, *others, _) = found
    assert guessed == tokens
    assert others == plain
    assert found[0][-1] <= found[1][-1] <= found[0][-1] + 1, "a stopped output may have computed a token more"


async def test_a_text_that_repeats_itself_takes_a_fraction_of_the_steps(start_worker: StartWorker) -> None:
    steps = []
    for speculation in (Speculation(), LOOKUP):
        async with start_worker(speculation=speculation) as worker:
            worker.model.logits = lambda hidden: torch.eye(VOCAB_SIZE)[5].expand(len(hidden), -1)  # type: ignore[method-assign]
            worker.lease("a", PROMPT, max_tokens=40)
            await worker.link.finished("a")
            assert [token for one in worker.link.progress("a") for token in one.token_ids] == [5] * 40
            steps.append(len(worker.model.steps))
            text = worker.telemetry.prometheus_text().decode()
    assert steps[0] == 39
    assert steps[1] <= 12
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    drafted, accepted = (float(values[f"meshfire_decode_{name}_total"]) for name in ("drafted", "accepted"))
    assert 0 < accepted <= drafted
    assert accepted == 39 - steps[1]


async def test_guesses_preempt_nobody_and_take_no_memory_that_others_need(start_worker: StartWorker) -> None:
    found = []
    for speculation in (Speculation(), Speculation(Wild, 9)):
        async with start_worker(num_blocks=7, speculation=speculation) as worker:
            for name in ("a", "b", "c"):
                worker.lease(name, PROMPT, max_tokens=20, sampling={"temperature": 0.0, "seed": 1})
            for name in ("a", "b", "c"):
                await worker.link.finished(name)
            tokens = {name: [token for one in worker.link.progress(name) for token in one.token_ids] for name in "abc"}
            found.append(tokens)
            await worker.until_idle()
    assert found[0] == found[1] == dict.fromkeys("abc", continuation(PROMPT, 20))


async def test_scripts_and_faults_are_not_guessed_at(start_worker: StartWorker) -> None:
    async with start_worker(speculation=Speculation(Wild, 4)) as worker:
        worker.lease("script", PROMPT, max_tokens=20, scripted=True, script_token_ids=[7] * 12)
        worker.lease("fault", PROMPT, max_tokens=6, fault="decode:delay=1ms@token=3")
        await worker.link.finished("script")
        await worker.link.finished("fault")
        assert worker.link.tokens("script") == [7] * 12
        assert all(max(chunks) == 1 for chunks in worker.model.chunks)


class TestPromptLookup:
    def test_it_says_what_followed_last_time(self) -> None:
        drafter = PromptLookup()
        assert drafter.draft([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], 2) == [8, 1]
        assert drafter.draft([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3, 9], 3) == [1, 2, 3]

    def test_a_longer_match_is_better(self) -> None:
        assert PromptLookup().draft([0, 1, 2, 3, 4, 9, 1, 2, 3, 5, 0, 1, 2, 3], 1) == [4]

    def test_a_period_goes_on(self) -> None:
        assert PromptLookup().draft([5, 6, 5, 6, 5, 6], 5) == [5, 6, 5, 6, 5]

    @pytest.mark.parametrize("text", [[], [1], [1, 2, 3], [1, 2, 3, 4, 5, 6]])
    def test_without_a_precedent_it_has_no_idea(self, text: list[int]) -> None:
        assert not PromptLookup().draft(text, 4)

    @given(st.lists(st.integers(0, 2), max_size=40), st.integers(0, 40), st.integers(1, 6))
    def test_a_text_that_grew_is_as_one_that_came_whole(self, text: list[int], first: int, max_tokens: int) -> None:
        drafter = PromptLookup()
        drafter.draft(text[:first], max_tokens)
        drafted = list(drafter.draft(text, max_tokens))
        assert drafted == list(PromptLookup().draft(text, max_tokens))
        assert len(drafted) <= max_tokens
        assert set(drafted) <= set(text)


def test_the_pace_follows_how_guesses_do() -> None:
    pace = DraftPace(PromptLookup(), 8)
    text = [1, 2, 3] * 4
    lengths = []
    for num_right in (0, 0, 0, 0, 1, 2, 1):
        drafted = pace.draft(text, 100)
        lengths.append(len(drafted))
        pace.verified(len(drafted), min(num_right, len(drafted)))
    assert lengths == [8, 4, 2, 1, 1, 2, 4]
    assert pace.draft(text, 2) == (1, 2)
    assert pace.draft(text, 0) == ()
