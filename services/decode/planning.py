"""From what each lease computes next to a plan for the model thread, and from its result back to the leases.

Owns the order of rows and choices, so that nobody else counts them. Runs on the event loop, between steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from meshfire.model.sampling import Sampled, TokenLogprobs
from meshfire.sched.batch import forward_batch
from meshfire.sched.parts import StepPart
from services.decode.lease import DecodeLease
from services.decode.step import Scoring, StepPlan, StepResult


@dataclass(frozen=True)
class LeasePart:
    """What one lease has in the next step."""

    lease: DecodeLease
    part: StepPart

    @property
    def chooses(self) -> bool:
        """Whether a token comes out of it."""
        return self.part.is_last and not self.lease.order.prompt_only

    @property
    def num_choices(self) -> int:
        """Tokens that are chosen: one, and one after each draft."""
        return 1 + len(self.part.draft_ids) if self.chooses else 0

    @property
    def num_scored(self) -> int:
        """Prompt tokens whose log-probability comes out of it."""
        if self.lease.order.num_prompt_logprobs is None:
            return 0
        return max(0, min(self.part.stop + 1, self.lease.order.num_prompt_tokens) - (self.part.start + 1))


@dataclass(frozen=True)
class PartResult:
    """What became of it."""

    lease: DecodeLease
    part: StepPart
    #: tokens to append, in order; none = it had no token to choose yet
    sampled: tuple[Sampled, ...]
    #: of prompt tokens from `part.start + 1` on
    scores: Sequence[TokenLogprobs]

    @property
    def num_accepted(self) -> int:
        """Drafts that were right: their KV is computed."""
        return max(0, len(self.sampled) - 1)


class PlannedStep:
    """A plan and whose rows are whose."""

    def __init__(self, parts: Iterable[LeasePart]) -> None:
        given = list(parts)
        computing = [one for one in given if one.lease.last_hidden is None]
        ready = [one for one in given if one.lease.last_hidden is not None]
        self._parts = computing + ready
        batch = forward_batch(one.part for one in computing) if computing else None
        slices = batch.sequences if batch is not None else ()
        hidden = tuple(one.lease.last_hidden for one in ready if one.lease.last_hidden is not None)
        self.plan = StepPlan(
            batch,
            [
                row
                for one, rows in zip(computing, slices, strict=True)
                for row in range(rows.stop - one.num_choices, rows.stop)
            ],
            hidden,
            tuple(choice for one in self._parts if one.chooses for choice in one.lease.choices(one.part.draft_ids)),
            tuple(_scoring(one, rows.start) for one, rows in zip(computing, slices, strict=True) if one.num_scored),
        )

    def results(self, done: StepResult) -> Iterator[PartResult]:
        """One per part; computing ones first."""
        sampled, scores = iter(done.sampled), iter(done.scores)
        for one in self._parts:
            chosen = [next(sampled) for _ in range(one.num_choices)]
            kept = accepted(chosen, one.part.draft_ids)
            yield PartResult(one.lease, one.part, kept, next(scores) if one.num_scored else ())


def accepted(sampled: Iterable[Sampled], draft_ids: Sequence[int]) -> tuple[Sampled, ...]:
    """Tokens chosen after right drafts only; the last one is the first that no draft foretold."""
    kept = []
    for index, one in enumerate(sampled):
        kept.append(one)
        if index < len(draft_ids) and one.token_id != draft_ids[index]:
            break
    return tuple(kept)


def _scoring(one: LeasePart, row: int) -> Scoring:
    num_top = one.lease.order.num_prompt_logprobs
    assert num_top is not None
    first = one.part.start + 1
    return Scoring(row, one.lease.sequence.token_ids[first : first + one.num_scored], num_top)
