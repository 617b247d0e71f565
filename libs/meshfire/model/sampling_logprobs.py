"""Log-probabilities of given tokens, for those who ask: a chosen token's, and a prompt's. Float64 throughout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from meshfire.model.sampling_rows import TokenLogprobs
from meshfire.model.sampling_truncate import ranked


def logprobs_of(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """One per row of `logits` [N, V]: that of `token_ids` [N], and those of the `num_top` likeliest tokens."""
    values = logits.detach().to("cpu").float().numpy()
    return [row_logprobs(row, token_id, num_top) for row, token_id in zip(values, token_ids, strict=True)]


def row_logprobs(logits: NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprobs:
    """As `logprobs_of`, for one row [V] of finite numbers and -inf."""
    exact = logits.astype(np.float64)
    peak = exact.max()
    log_sum = peak + np.log(np.exp(exact - peak).sum())
    top = ranked(logits, min(num_top, len(logits)))
    return TokenLogprobs(float(exact[token_id] - log_sum), tuple(top.tolist()), tuple((exact[top] - log_sum).tolist()))
