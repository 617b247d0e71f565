"""From logits to a token: one choice per sequence of a step that no batch neighbour can change.

Owns the order of the steps: masks, penalties, bias, end tokens held back (`sampling_adjust`); then the largest logit if
the temperature is 0, else temperature, top-k, top-p, min-p (`sampling_truncate`) and the largest of (logit + noise)
among the tokens kept. Equal values go to the lowest id everywhere. Logits stay float32, as the model gives them; sums,
noise and the last comparison are float64. Knows no requests and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from meshfire.errors import NonFiniteValue
from meshfire.model.noise import Words, gumbel, words_of
from meshfire.model.sampling_adjust import adjust
from meshfire.model.sampling_logprobs import row_logprobs
from meshfire.model.sampling_params import SamplingParams
from meshfire.model.sampling_rows import AllowedTokens, Sampled, SamplingRow, TokenLogprobs
from meshfire.model.sampling_truncate import kept_tokens

__all__ = ["AllowedTokens", "Sampled", "SamplingParams", "SamplingRow", "TokenLogprobs", "sample"]

Floats: TypeAlias = NDArray[np.float32]
Ids: TypeAlias = NDArray[np.int64]

#: Logits that are copied to be changed at once: 8 MiB, whatever the batch and the vocabulary.
_BLOCK_ELEMENTS = 2**21
_COLDEST = 1e-30  # a temperature below it is one: float32 has no smaller quotient to tell apart
#: from so many tokens on, it pays to look first which can win at all
_WORTH_PRUNING = 1024
_LIKELY = 2.0  # of the largest logit over temperature
_SLACK = 1e-3  # far above any rounding of what is compared


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """Choose one token per row of `logits` [B, V] (any float type and device; not changed); -inf bans a token.

    Raises NonFiniteValue for NaN, +inf or a row without an allowed token, BadInput for ids outside the vocabulary.
    """
    values = logits.detach().to("cpu").float().numpy()
    tokens = values.argmax(axis=1)  # that of a row with NaN is a NaN: what is checked below covers all of the row
    peaks = values[np.arange(len(values)), tokens]
    _check(peaks)
    with np.errstate(over="ignore"):  # a tiny temperature scales to -inf, which is what it means
        changed = []
        for index, row in enumerate(rows):
            if row.is_only_masked:
                tokens[index] = _likeliest_allowed(values[index], int(tokens[index]), row)
                peaks[index] = values[index, tokens[index]]
            elif not row.is_plain:
                changed.append(index)
        for block in _blocks(changed, values.shape[1]):
            tokens[block] = _choose(values[block], [rows[index] for index in block])
        untouched = [index for index, row in enumerate(rows) if row.is_plain or row.is_only_masked]
        drawn = [index for index in untouched if rows[index].params.temperature > 0]
        tokens[drawn] = _draw(values, peaks, rows, drawn)
    return [
        Sampled(token, _logprobs(values[index], token, rows[index].params.num_logprobs))
        for index, token in enumerate(tokens.tolist())
    ]


def _likeliest_allowed(logits: Floats, likeliest: int, row: SamplingRow) -> int:
    """The mask's best token: mostly the likeliest of all, so nothing is copied; equal values go to the lowest id."""
    mask = row.allowed_mask(len(logits))
    if mask is None or mask[likeliest]:
        return likeliest
    allowed = np.flatnonzero(mask)
    _check(logits[allowed].max(keepdims=True, initial=-np.inf))
    return int(allowed[logits[allowed].argmax()])


def _choose(logits: Floats, rows: Sequence[SamplingRow]) -> Ids:
    """The tokens of rows whose logits are changed first; `logits` [G, V] are theirs."""
    adjust(logits, rows)
    tokens: Ids = logits.argmax(axis=1)
    peaks = logits[np.arange(len(rows)), tokens]
    _check(peaks)
    drawn = [place for place, row in enumerate(rows) if row.params.temperature > 0]
    tokens[drawn] = _draw(logits, peaks, rows, drawn)
    return tokens


def _draw(logits: Floats, peaks: Floats, rows: Sequence[SamplingRow], drawn: Sequence[int]) -> list[int]:
    """Sample rows `drawn` from the softmax of their kept tokens; `peaks` are the largest logits of each row."""
    kept: list[Ids] = []
    left: list[Floats] = []
    for index in drawn:
        params = rows[index].params
        scaled = logits[index] - peaks[index]
        mask = rows[index].allowed_mask(len(scaled)) if rows[index].is_only_masked else None
        if mask is not None:
            scaled[~mask] = -np.inf
        scaled /= np.float32(max(params.temperature, _COLDEST))
        own = kept_tokens(scaled, params)
        kept.append(own)
        left.append(scaled[own])
    words = words_of([(rows[index].params.seed, rows[index].position) for index in drawn], kept)
    return [int(own[_winner(one, noise)]) for own, one, noise in zip(kept, left, words, strict=True)]


def _winner(scaled: Floats, words: Words) -> int:
    """Index of the largest scaled logit + Gumbel noise."""
    able = _able(scaled, words) if len(scaled) > _WORTH_PRUNING else slice(None)
    noisy = scaled[able] + gumbel(words[able])
    place = int(noisy.argmax())
    return place if isinstance(able, slice) else int(able[place])


def _able(scaled: Floats, words: Words) -> Ids:
    """Indices of tokens that may win: those that would with the largest noise of all, against the likeliest ones."""
    likely = np.flatnonzero(scaled >= -_LIKELY)
    to_beat = (scaled[likely] + gumbel(words[likely])).max()
    largest = gumbel(words.max(keepdims=True))[0]
    return np.flatnonzero(scaled >= float(to_beat - largest) - _SLACK)


def _logprobs(logits: Floats, token_id: int, num_top: int | None) -> TokenLogprobs | None:
    return None if num_top is None else row_logprobs(logits, token_id, num_top)


def _blocks(indices: Sequence[int], vocab_size: int) -> list[Sequence[int]]:
    num_rows = max(1, _BLOCK_ELEMENTS // vocab_size)
    return [indices[start : start + num_rows] for start in range(0, len(indices), num_rows)]


def _check(peaks: Floats) -> None:
    """`peaks` [B]: the largest value of each row."""
    wrong = np.flatnonzero(~np.isfinite(peaks))
    if wrong.size:
        message = f"logits of row {wrong[0]} hold NaN or infinity, or allow no token"
        raise NonFiniteValue(message, field="logits")
