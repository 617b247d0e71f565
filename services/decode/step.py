"""One step of the running batch, as a pure function for the model thread.

Owns what happens between token ids and chosen tokens: forward, logits, sampling, scripts. A step changes nothing
but KV rows, and those only to what they will be again if it is repeated: a step that failed may be run once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshfire.model.interface import CausalLM, ExpertBackend, ForwardBatch, KvView
from meshfire.model.sampling import Sampled, SamplingRow, sample
from meshfire.model.sampling_logprobs import logprobs_of
from services.decode.rules import NextMask


@dataclass(frozen=True)
class TokenChoice:
    """How the next token of one sequence is chosen."""

    row: SamplingRow
    #: test hook: the token that is chosen instead of the sampled one
    forced: int | None = None
    #: of the sequence's rule; computed while the model runs
    mask: NextMask | None = None

    def masked_row(self) -> SamplingRow:
        """With the mask, which is waited for. Raises BadInput for a rule that cannot be followed any further."""
        return self.row if self.mask is None else replace(self.row, allowed=self.mask.result())


@dataclass(frozen=True)
class StepPlan:
    """Sequences to run through the model, then sequences whose last hidden state came with their KV."""

    #: one row per sequence; None = no sequence needs the model
    batch: ForwardBatch | None
    #: hidden states [H] of the others
    ready: tuple[Tensor, ...]
    #: one per sequence, in this order
    choices: tuple[TokenChoice, ...]


def run_step(model: CausalLM, kv: KvView, experts: ExpertBackend, plan: StepPlan) -> list[Sampled]:
    """The next token of each sequence of `plan`. Raises what the experts and the masks raise."""
    logits = model.logits(_last_hidden(model, kv, experts, plan))  # [B, V]
    sampled = sample(logits, [choice.masked_row() for choice in plan.choices])
    return [
        one if choice.forced is None else _force(choice.row, choice.forced, logits[row : row + 1])
        for row, (one, choice) in enumerate(zip(sampled, plan.choices, strict=True))
    ]


def _last_hidden(model: CausalLM, kv: KvView, experts: ExpertBackend, plan: StepPlan) -> Tensor:
    """Hidden state of each sequence's last token: [B, H]."""
    rows: Sequence[Tensor] = plan.ready
    if plan.batch is not None:
        hidden = model.forward(plan.batch, kv, experts)  # [T, H]
        rows = [*(hidden[one.stop - 1] for one in plan.batch.sequences), *plan.ready]
    return torch.stack(list(rows))


def _force(row: SamplingRow, token_id: int, logits: Tensor) -> Sampled:
    """The same position with another choice; `logits` [1, V]."""
    num_top = row.params.num_logprobs
    return Sampled(token_id, None if num_top is None else logprobs_of(logits, [token_id], num_top)[0])
