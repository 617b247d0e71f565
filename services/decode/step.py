"""One step of the running batch, as a pure function for the model thread.

Owns what happens between token ids and chosen tokens: forward, logits, sampling, scripts, scores of a prompt. A step
changes nothing but KV rows, and those only to what they will be again if it is repeated: a step that failed may be run
once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshfire.model.interface import CausalLM, ExpertBackend, ForwardBatch, KvView
from meshfire.model.prompt_scores import score
from meshfire.model.sampling import Sampled, SamplingRow, TokenLogprobs, sample
from meshfire.model.sampling_logprobs import logprobs_of
from services.decode.rules import NextMask
from services.decode.wanted import Wish


@dataclass(frozen=True)
class TokenChoice:
    """How the next token of one sequence is chosen."""

    row: SamplingRow
    #: test hook: the token that is chosen instead of the sampled one
    forced: int | None = None
    #: of the sequence's rule; computed while the model runs
    mask: NextMask | None = None
    #: test hook: what is chosen instead, of what the mask allows
    wish: Wish | None = None

    def masked(self) -> TokenChoice:
        """With the mask, which is waited for. Raises BadInput for a rule that cannot be followed any further."""
        if self.mask is None:
            return self
        allowed = self.mask.result()
        forced = self.wish.choice(allowed) if self.wish else self.forced
        return TokenChoice(replace(self.row, allowed=allowed), forced)


@dataclass(frozen=True)
class Scoring:
    """Log-probabilities of prompt tokens: `following` come after those of the batch's rows from `start` on."""

    start: int
    following: Sequence[int]
    #: likeliest tokens to tell at each place
    num_top: int


@dataclass(frozen=True)
class StepPlan:
    """Sequences to run through the model, and sequences whose last hidden state came with their KV."""

    #: None = no sequence needs the model
    batch: ForwardBatch | None
    #: rows of the batch from which a token is chosen
    rows: Sequence[int]
    #: hidden states [H] of those whose state came
    ready: tuple[Tensor, ...]
    #: one for each of `rows`, then one for each of `ready`
    choices: tuple[TokenChoice, ...]
    scorings: tuple[Scoring, ...] = ()


@dataclass(frozen=True)
class StepResult:
    """What a plan asked for, in its order."""

    sampled: list[Sampled]
    scores: list[list[TokenLogprobs]]


def run_step(model: CausalLM, kv: KvView, experts: ExpertBackend, plan: StepPlan) -> StepResult:
    """Run a plan. Raises what the experts and the masks raise."""
    hidden = None if plan.batch is None else model.forward(plan.batch, kv, experts)  # [T, H]
    scores = []
    for one in plan.scorings:
        assert hidden is not None, "prompts are scored while they are computed"
        scores.append(score(model, hidden[one.start :], one.following, one.num_top))
    return StepResult(_sampled(model, plan, hidden), scores)


def _sampled(model: CausalLM, plan: StepPlan, hidden: Tensor | None) -> list[Sampled]:
    if not plan.choices:
        return []
    logits = model.logits(_chosen_from(plan, hidden))  # [C, V]
    choices = [choice.masked() for choice in plan.choices]
    sampled = sample(logits, [choice.row for choice in choices])
    return [
        one if choice.forced is None else _force(choice.row, choice.forced, logits[row : row + 1])
        for row, (one, choice) in enumerate(zip(sampled, choices, strict=True))
    ]


def _chosen_from(plan: StepPlan, hidden: Tensor | None) -> Tensor:
    """Hidden states that tokens are chosen from: [C, H]."""
    found = list(plan.ready)
    if hidden is not None and plan.rows:
        found = [hidden[torch.tensor(plan.rows)], *(one[None] for one in plan.ready)]
        return torch.cat(found) if plan.ready else found[0]
    return torch.stack(found)


def _force(row: SamplingRow, token_id: int, logits: Tensor) -> Sampled:
    """The same position with another choice; `logits` [1, V]."""
    num_top = row.params.num_logprobs
    return Sampled(token_id, None if num_top is None else logprobs_of(logits, [token_id], num_top)[0])
