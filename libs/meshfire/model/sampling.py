"""From logits to a token: penalties, truncation, and a choice that no batch neighbour can change.

Owns the order of the steps: repetition, frequency and presence penalties; bias; end tokens held back; then, unless the
temperature is 0, temperature, top-k, top-p, min-p, and the largest of (logit + noise) among the tokens kept. Equal
values go to the lowest id everywhere. All arithmetic is float64 in numpy, row by row. Knows no requests and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from meshfire.errors import BadInput, NonFiniteValue
from meshfire.model.noise import gumbel
from meshfire.model.sampling_params import SamplingParams

__all__ = ["Sampled", "SamplingParams", "SamplingRow", "sample"]

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

_NUCLEUS_GUESS = 256  # tokens sorted first; a nucleus is seldom larger


@dataclass(frozen=True)
class SamplingRow:
    """One sequence of a step. `position`: of the token to choose, counted from the start of the prompt."""

    params: SamplingParams
    position: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


@dataclass(frozen=True)
class Sampled:
    """A chosen token. Log-probabilities are of the logits as given: before penalties, bias, temperature, truncation.

    `top_ids` and `top_logprobs` have `params.num_logprobs` entries, likeliest first.
    """

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """Choose one token per row of `logits` [B, V]; -inf bans a token.

    Raises NonFiniteValue for NaN, +inf or a row without an allowed token, BadInput for ids outside the vocabulary.
    """
    values = logits.detach().to("cpu").double().numpy()
    return [_sample_row(values[index], row) for index, row in enumerate(rows)]


def _sample_row(logits: Floats, row: SamplingRow) -> Sampled:
    if not logits.max() < np.inf or logits.max() == -np.inf:  # NaN fails the first comparison
        raise NonFiniteValue("logits hold NaN or infinity, or allow no token", field="logits")
    adjusted = _adjust(logits, row)
    token = int(adjusted.argmax()) if row.params.temperature == 0 else _draw(adjusted, row)
    logprobs = logits - _log_sum_exp(logits)
    top = _largest(logprobs, min(row.params.num_logprobs or 0, len(logits)))
    return Sampled(token, float(logprobs[token]), tuple(top.tolist()), tuple(logprobs[top].tolist()))


def _adjust(logits: Floats, row: SamplingRow) -> Floats:
    """Penalties, bias, end tokens held back."""
    params, adjusted = row.params, logits.copy()
    output, counts = np.unique(_ids(row.output_ids, len(logits)), return_counts=True)
    if params.repetition_penalty != 1:
        seen = np.union1d(output, _ids(row.prompt_ids, len(logits)))
        penalty = params.repetition_penalty
        adjusted[seen] = np.where(adjusted[seen] > 0, adjusted[seen] / penalty, adjusted[seen] * penalty)
    adjusted[output] -= params.frequency_penalty * counts + params.presence_penalty
    if params.logit_bias:
        adjusted[_ids(list(params.logit_bias), len(logits))] += list(params.logit_bias.values())
    if len(row.output_ids) < params.min_tokens:
        adjusted[_ids(params.end_token_ids + params.stop_token_ids, len(logits))] = -np.inf
    return adjusted


def _draw(adjusted: Floats, row: SamplingRow) -> int:
    """Sample from the softmax of the kept tokens: the largest of logit + Gumbel noise."""
    params = row.params
    scaled = (adjusted - adjusted.max()) / params.temperature
    kept = _keep(scaled, params)
    noisy = scaled[kept] + gumbel(params.seed, row.position, len(adjusted), kept)
    return int(kept[noisy.argmax()])


def _keep(scaled: Floats, params: SamplingParams) -> Ids:
    """Ids that pass top-k, then top-p among those, then min-p; ascending, never empty."""
    kept = _largest(scaled, params.top_k) if 0 < params.top_k < len(scaled) else np.flatnonzero(scaled > -np.inf)
    if params.top_p < 1:
        kept = kept[_nucleus(np.exp(scaled[kept] - _log_sum_exp(scaled[kept])), params.top_p)]
    if params.min_p > 0:
        kept = kept[scaled[kept] >= scaled[kept].max() + np.log(params.min_p)]
    return np.sort(kept[scaled[kept] > -np.inf])


def _nucleus(probabilities: Floats, top_p: float) -> Ids:
    """Indices of the smallest set of likeliest entries whose sum reaches `top_p`."""
    wanted = _NUCLEUS_GUESS
    while True:
        order = _largest(probabilities, min(wanted, len(probabilities)))
        sums = probabilities[order].cumsum()
        if sums[-1] >= top_p or len(order) == len(probabilities):
            return order[: int(np.searchsorted(sums, top_p)) + 1]
        wanted *= 8


def _largest(values: Floats, count: int) -> Ids:
    """Indices of the `count` largest values, largest first, equal ones by index."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    threshold = np.partition(values, -count)[-count]
    candidates = np.flatnonzero(values >= threshold)
    return candidates[np.argsort(-values[candidates], kind="stable")][:count]


def _log_sum_exp(values: Floats) -> float:
    peak = values.max()
    return float(peak + np.log(np.exp(values - peak).sum()))


def _ids(token_ids: Sequence[int], vocab_size: int) -> Ids:
    ids = np.asarray(token_ids, dtype=np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise BadInput(f"token ids must be below {vocab_size}", field="token_ids")
    return ids
