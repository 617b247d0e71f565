"""Edges of how long an output is: the model's end tokens, the caller's stop ids, min_tokens and max_tokens together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshfire.api.common.v1 import sampling_pb2
from tests.unit.decode.conftest import Worker
from tests.unit.decode.fakes import END_ID, VOCAB_SIZE, continuation

STOP = sampling_pb2.FINISH_REASON_STOP
LENGTH = sampling_pb2.FINISH_REASON_LENGTH

PROMPT = [1, 2, 3]
NEXT = continuation(PROMPT, 6)


def likes_to_end(worker: Worker) -> None:
    """Make its end token the likeliest everywhere, then token 7."""
    ranks = torch.zeros(VOCAB_SIZE)
    ranks[END_ID], ranks[7] = 2.0, 1.0
    worker.model.logits = lambda hidden: ranks.expand(len(hidden), -1)  # type: ignore[method-assign]


async def run(worker: Worker, max_tokens: int, *, so_far: int = 0, **sampling: Any) -> tuple[list[int], Any]:
    """The tokens and how they ended; `so_far` = an earlier worker chose so many already."""
    tokens = PROMPT + NEXT[:so_far]
    worker.lease("a", tokens, max_tokens=max_tokens, num_prompt_tokens=len(PROMPT), sampling=sampling)
    end = await worker.link.finished("a")
    return worker.link.tokens("a"), end


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
async def test_a_stop_id_is_held_back_for_exactly_min_tokens(worker: Worker, min_tokens: int) -> None:
    """Every token of the vocabulary but one would end it."""
    others = [token for token in range(END_ID) if token != 7]
    tokens, end = await run(worker, 9, min_tokens=min_tokens, stop_token_ids=others)
    assert tokens == [7] * min_tokens
    assert end.finish_reason == STOP
    assert end.stop_token_id in others


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
async def test_the_models_end_token_is_held_back_for_exactly_min_tokens(worker: Worker, min_tokens: int) -> None:
    likes_to_end(worker)
    tokens, end = await run(worker, 9, min_tokens=min_tokens)
    assert tokens == [7] * min_tokens
    assert (end.finish_reason, end.stop_token_id) == (STOP, END_ID)


async def test_min_tokens_counts_what_earlier_workers_chose(worker: Worker) -> None:
    tokens, end = await run(worker, 9, so_far=2, min_tokens=4, stop_token_ids=list(range(7)) + list(range(8, END_ID)))
    assert tokens == [7, 7]
    assert end.finish_reason == STOP


async def test_an_ignored_end_token_is_neither_held_back_nor_an_end(worker: Worker) -> None:
    likes_to_end(worker)
    tokens, end = await run(worker, 3, min_tokens=3, ignore_eos=True)
    assert tokens == [END_ID] * 3
    assert (end.finish_reason, end.HasField("stop_token_id")) == (LENGTH, False)


async def test_a_stop_id_ends_an_output_whose_end_tokens_are_ignored(worker: Worker) -> None:
    likes_to_end(worker)
    tokens, end = await run(worker, 9, ignore_eos=True, stop_token_ids=[END_ID])
    assert (tokens, end.finish_reason, end.stop_token_id) == ([], STOP, END_ID)


async def test_an_end_in_the_last_place_is_an_end_and_not_the_length(worker: Worker) -> None:
    last = NEXT[2]
    assert last not in NEXT[:2]
    tokens, end = await run(worker, 3, stop_token_ids=[last])
    assert (tokens, end.finish_reason, end.stop_token_id) == (NEXT[:2], STOP, last)


@pytest.mark.parametrize("length", [1, 4])
async def test_min_tokens_up_to_max_tokens_gives_exactly_so_many(worker: Worker, length: int) -> None:
    tokens, end = await run(worker, length, min_tokens=length, stop_token_ids=NEXT[:4])
    assert len(tokens) == length
    assert not set(tokens) & set(NEXT[:4])
    assert end.finish_reason == LENGTH
