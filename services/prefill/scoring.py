"""Log-probabilities of a prompt's own tokens, from the hidden states that its pass computes anyway."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from meshfire.model.interface import CausalLM
from meshfire.model.sampling import TokenLogprobs
from meshfire.model.sampling_logprobs import logprobs_of
from services.prefill.chunks import Chunk

#: Rows of logits at once: 40 MiB for a vocabulary of 163,840.
_ROWS = 64


def score(model: CausalLM, hidden: Tensor, chunk: Chunk, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Of the tokens that follow each of the chunk's in the prompt `token_ids`, with the `num_top` likeliest.

    `hidden` [T, H] are the chunk's rows. The prompt's last token is followed by nothing: that place is the output's.
    """
    following = token_ids[chunk.start + 1 : chunk.stop + 1]
    scored: list[TokenLogprobs] = []
    for start in range(0, len(following), _ROWS):
        wanted = following[start : start + _ROWS]
        scored += logprobs_of(model.logits(hidden[start : start + len(wanted)]), wanted, num_top)
    return scored
