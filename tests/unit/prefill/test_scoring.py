"""Log-probabilities of a prompt: the same whatever the chunks, never from the cache, and told before the offer."""

from __future__ import annotations

import pytest
import torch

from meshfire.model import prompt_scores
from meshfire.worker import prompt_logprobs
from services.prefill.chunks import chunks_of
from tests.unit.prefill.conftest import Worker
from tests.unit.prefill.fakes import VOCAB_SIZE, FakeModel, expected_hidden, lease_of, until

PROMPT = list(range(1, 15))


def logits(hidden: torch.Tensor) -> torch.Tensor:
    """[N, 2] → [N, V]: a function of both numbers of a hidden state."""
    tokens = torch.arange(VOCAB_SIZE, dtype=torch.float32)
    return torch.sin(hidden[:, :1] + tokens) * 3 + torch.cos(hidden[:, 1:] * tokens)


def expected() -> torch.Tensor:
    """[T - 1, V], from plain hidden states."""
    hidden = torch.tensor([expected_hidden(PROMPT[: stop + 1]) for stop in range(len(PROMPT) - 1)])
    return logits(hidden).double().log_softmax(-1)


@pytest.fixture
def scorer(worker: Worker) -> Worker:
    worker.model.logits = logits  # type: ignore[method-assign]
    return worker


async def test_each_token_from_the_second_on_is_told_with_the_likeliest_at_its_place(
    scorer: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "LOGPROBS_PER_MESSAGE", 5)
    lease = lease_of(PROMPT)
    lease.prefill.num_prompt_logprobs = 3
    scorer.engine.on_lease("router-1", lease)
    await until(lambda: any(message.HasField("kv_offer") for _, message in scorer.link.sent))
    *parts, offer = [message for _, message in scorer.link.sent]
    assert offer.HasField("kv_offer"), "it comes last"
    assert [one.prompt_logprobs.first_index for one in parts] == [1, 6, 11]
    told = [one for part in parts for one in part.prompt_logprobs.logprobs]
    at = expected()
    for place, (token, one) in enumerate(zip(PROMPT[1:], told, strict=True)):
        assert one.logprob == pytest.approx(float(at[place, token]), abs=1e-6)
        values, ids = at[place].topk(3)
        assert list(one.top_ids) == ids.tolist()
        assert list(one.top_logprobs) == pytest.approx(values.tolist(), abs=1e-6)


async def test_scores_are_computed_whatever_is_cached_and_fill_the_cache_for_others(scorer: Worker) -> None:
    scorer.engine.on_lease("router-1", lease_of(PROMPT))
    await scorer.link.message(0)
    scorer.model.steps.clear()
    lease = lease_of(PROMPT, request_id="r2")
    lease.prefill.num_prompt_logprobs = 0
    scorer.engine.on_lease("router-1", lease)
    scored, offer = await scorer.link.message(1), (await scorer.link.message(2)).kv_offer
    assert len(scored.prompt_logprobs.logprobs) == len(PROMPT) - 1
    assert offer.num_cached_tokens == 0
    assert sum(map(len, scorer.model.steps)) == len(PROMPT)
    scorer.engine.on_cancel("router-1", "r1", 1)
    scorer.engine.on_cancel("router-1", "r2", 1)
    assert scorer.all_blocks_are_free()
    scorer.engine.on_lease("router-1", lease_of(PROMPT, request_id="r3"))
    assert (await scorer.link.message(3)).kv_offer.num_cached_tokens == 12


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 5, 14, 100])
def test_neither_chunks_nor_slices_change_a_bit(chunk_tokens: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = torch.tensor([expected_hidden(PROMPT[: stop + 1]) for stop in range(len(PROMPT))])
    model = FakeModel()
    model.logits = logits  # type: ignore[method-assign]
    at_once = prompt_scores.score(model, hidden, PROMPT[1:], 2)
    monkeypatch.setattr(prompt_scores, "_ROWS", rows)
    cut = [
        one
        for chunk in chunks_of(0, len(PROMPT), chunk_tokens)
        for one in prompt_scores.score(
            model, hidden[chunk.start : chunk.stop], PROMPT[chunk.start + 1 : chunk.stop + 1], 2
        )
    ]
    assert cut == at_once
    assert len(cut) == len(PROMPT) - 1
