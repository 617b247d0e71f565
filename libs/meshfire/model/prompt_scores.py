"""Log-probabilities of a prompt's own tokens, from the hidden states that computing it gives anyway."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from meshfire.model.interface import CausalLM
from meshfire.model.sampling_logprobs import logprobs_of
from meshfire.model.sampling_rows import TokenLogprobs

#: Rows of logits at once: 40 MiB for a vocabulary of 163,840.
_ROWS = 64


def score(model: CausalLM, hidden: Tensor, following: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Of each of the tokens `following` [N], which come right after those of `hidden` [≥ N, H], with the `num_top`
    likeliest ones at its place."""
    scored: list[TokenLogprobs] = []
    for start in range(0, len(following), _ROWS):
        wanted = following[start : start + _ROWS]
        scored += logprobs_of(model.logits(hidden[start : start + len(wanted)]), wanted, num_top)
    return scored
