"""Rules in a decode worker: masks with the batch, replay after a failover, failures that stay with their lease.

The oracle is FakeModel's own preference: of the tokens that a list of texts allows, the one nearest to its wish.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from meshfire.api.common.v1 import output_rule_pb2, sampling_pb2
from meshfire.grammar.compiler import GrammarCompiler
from meshfire.grammar.rules import ChoiceRule, JsonRule, OutputRule, RegexRule
from meshfire.rpc import output_rule
from services.decode.rules import RuleBook
from tests.letters import LettersTokenizer
from tests.unit.decode.conftest import StartWorker, Worker
from tests.unit.decode.fakes import END_ID, VOCAB_SIZE, continuation, next_token

STOP, LENGTH = sampling_pb2.FINISH_REASON_STOP, sampling_pb2.FINISH_REASON_LENGTH
TOKENIZER = LettersTokenizer([*(bytes([one]) for one in b"abcdefghijklmnopqrstuvwxyz0123456789"), b"ab", b"<"])
assert (TOKENIZER.vocabulary.size, TOKENIZER.end_token_ids) == (VOCAB_SIZE, (END_ID,))
TEXTS = ("abba", "abc", "zebra", "m3", "7777")


def wire(rule: ChoiceRule | RegexRule | JsonRule) -> output_rule_pb2.OutputRule:
    return output_rule.to_wire(OutputRule(rule))


def expected_under(texts: Sequence[str], prompt: Sequence[int]) -> list[int]:
    """Nearest to the model's wish, the lower id first, as its logits fall with the square of the distance."""
    output: list[int] = []
    while True:
        said = b"".join(TOKENIZER.vocabulary.bytes_of(one) for one in output)
        allowed = [
            one
            for one, piece in enumerate(TOKENIZER.pieces)
            if any(text.encode().startswith(said + piece) for text in texts)
        ]
        allowed += [END_ID] if said.decode() in texts else []
        wish = next_token([*prompt, *output])
        token_id = min(allowed, key=lambda one: ((one - wish) ** 2, one))
        if token_id == END_ID:
            return output
        output.append(token_id)


@pytest.fixture
async def ruled(start_worker: StartWorker) -> AsyncIterator[Worker]:
    async with start_worker(rules=RuleBook(GrammarCompiler(TOKENIZER, VOCAB_SIZE))) as worker:
        yield worker


async def test_a_rule_binds_its_own_sequence_and_no_other(ruled: Worker) -> None:
    ruled.lease("free", [1, 2], max_tokens=12)
    ruled.lease("bound", [1, 2], max_tokens=20, rule=wire(ChoiceRule(TEXTS)))
    ruled.lease("other", [3], max_tokens=20, rule=wire(RegexRule("(a|b){3}x?")))
    end = await ruled.link.finished("bound")
    assert (end.finish_reason, end.stop_token_id) == (STOP, END_ID)
    assert ruled.link.tokens("bound") == expected_under(TEXTS, [1, 2])
    await ruled.link.finished("free")
    assert ruled.link.tokens("free") == continuation([1, 2], 12)
    await ruled.link.finished("other")
    text = b"".join(TOKENIZER.vocabulary.bytes_of(one) for one in ruled.link.tokens("other")).decode()
    assert len(text) in (3, 4)
    assert set(text[:3]) <= {"a", "b"}


@pytest.mark.parametrize("so_far", [0, 1, 2])
async def test_a_later_epoch_replays_what_was_said(ruled: Worker, so_far: int) -> None:
    whole = expected_under(TEXTS, [1, 2])
    ruled.lease(
        "a",
        [1, 2, *whole[:so_far]],
        epoch=2,
        num_prompt_tokens=2,
        max_tokens=20,
        rule=wire(ChoiceRule(TEXTS)),
    )
    await ruled.link.finished("a", epoch=2)
    assert ruled.link.tokens("a", epoch=2) == whole[so_far:]


async def test_the_end_of_a_rule_is_an_end_before_min_tokens_too(ruled: Worker) -> None:
    ruled.lease("a", [1], max_tokens=20, sampling={"min_tokens": 15}, rule=wire(ChoiceRule(("m3",))))
    end = await ruled.link.finished("a")
    assert (end.finish_reason, ruled.link.tokens("a")) == (STOP, TOKENIZER.encode_plain("m3"))


async def test_max_tokens_cuts_a_rule_short(ruled: Worker) -> None:
    ruled.lease("a", [1], max_tokens=2, rule=wire(ChoiceRule(("zebra",))))
    assert (await ruled.link.finished("a")).finish_reason == LENGTH
    assert ruled.link.tokens("a") == TOKENIZER.encode_plain("ze")


async def test_a_rule_that_cannot_be_fails_its_own_lease(ruled: Worker) -> None:
    ruled.lease("bad", [1], rule=wire(RegexRule("(")))
    ruled.lease("good", [1], max_tokens=9)
    failure = await ruled.link.failed("bad")
    assert (failure.reason, failure.retryable) == ("BAD_INPUT", False)
    await ruled.link.finished("good")
    await ruled.until_idle()


async def test_an_output_that_does_not_fit_its_rule_fails_its_own_lease(ruled: Worker) -> None:
    """As if another worker had said something else."""
    ruled.lease("broken", [1, 2, 25], epoch=2, num_prompt_tokens=2, rule=wire(ChoiceRule(("abc",))))
    ruled.lease("good", [1], max_tokens=9)
    assert (await ruled.link.failed("broken", epoch=2)).reason == "INTERNAL_ERROR"
    await ruled.link.finished("good")
    assert ruled.link.tokens("good") == continuation([1], 9)
    await ruled.until_idle()


async def test_a_cancel_while_the_rule_is_opened_frees_all(ruled: Worker) -> None:
    ruled.lease("a", [1, 2], rule=wire(ChoiceRule(TEXTS)))
    ruled.engine.on_cancel("router-0", "a", 1)
    await ruled.until_idle()


async def test_a_worker_without_a_tokenizer_refuses_rules(worker: Worker) -> None:
    worker.lease("a", [1], rule=wire(ChoiceRule(("abc",))))
    assert (await worker.link.failed("a")).reason == "BAD_INPUT"


@pytest.mark.parametrize(
    ("wants", "said"),
    [
        (b"zebra", "zebra"),
        (b"abba", "abba"),
        (b"abxx", "abba"),  # then the allowed token with the lowest id
        (b"quite else", "abba"),
        (b"", "abba"),
        (b"7777", "7777"),
    ],
)
@pytest.mark.parametrize("so_far", [0, 1])
async def test_a_wanted_text_is_said_as_far_as_the_rule_lets_it(
    ruled: Worker, wants: bytes, said: str, so_far: int
) -> None:
    texts = ("abba", "zebra", "7777")
    a = TOKENIZER.encode_plain("a")
    # Of "ab" and "a" the wish takes the longest, the fallback the lowest id.
    whole = TOKENIZER.encode_plain(said) if wants in (b"abba", b"abxx") or said != "abba" else [*a, 1, 1, *a]
    ruled.lease(
        "a",
        [1, 2, *whole[:so_far]],
        epoch=2,
        num_prompt_tokens=2,
        max_tokens=20,
        rule=wire(ChoiceRule(texts)),
        scripted=True,
        script_wants=wants,
        script_ends_with_eos=True,
    )
    end = await ruled.link.finished("a", epoch=2)
    assert ruled.link.tokens("a", epoch=2) == whole[so_far:]
    assert (end.finish_reason, end.stop_token_id) == (STOP, END_ID)


async def test_a_wanted_text_may_end_for_its_length(ruled: Worker) -> None:
    ruled.lease("a", [1], max_tokens=20, rule=wire(ChoiceRule(("zebra",))), scripted=True, script_wants=b"ze")
    assert (await ruled.link.finished("a")).finish_reason == LENGTH
    assert ruled.link.tokens("a") == TOKENIZER.encode_plain("ze")


async def test_forced_tokens_break_a_rule_without_harm(ruled: Worker) -> None:
    script = TOKENIZER.encode_plain("aqq")
    ruled.lease(
        "a",
        [1],
        max_tokens=20,
        rule=wire(ChoiceRule(("abc",))),
        scripted=True,
        script_token_ids=script,
        script_ends_with_eos=True,
    )
    await ruled.link.finished("a")
    assert ruled.link.tokens("a") == script


async def test_masks_of_a_draft_come_from_the_same_thread(ruled: Worker) -> None:
    book = RuleBook(GrammarCompiler(TOKENIZER, VOCAB_SIZE))
    try:
        ruler = await book.open(OutputRule(ChoiceRule(("abc",))), in_reasoning=False, may_break=False)
        a, b, q = (TOKENIZER.encode_plain(one)[0] for one in "abq")
        masks = ruler.masks_along([a], [b, q]).result()
        assert [np.flatnonzero(one).tolist() for one in masks if one is not None] == [[b], TOKENIZER.encode_plain("c")]
        again = ruler.next_mask([a]).result()
        assert again is not None
        assert np.flatnonzero(again).tolist() == [b]
    finally:
        book.close()
