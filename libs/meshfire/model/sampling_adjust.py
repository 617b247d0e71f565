"""What changes logits before a token is chosen: masks, penalties, bias, end tokens held back, in this order.

Owns the arithmetic of these steps, for all rows of a step at once. Knows no temperature and chooses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshfire.errors import BadInput
from meshfire.model.sampling_rows import SamplingRow

Floats: TypeAlias = NDArray[np.float32]
Ids: TypeAlias = NDArray[np.int64]

_LARGEST = float(np.finfo(np.float32).max)


def adjust(logits: Floats, rows: Sequence[SamplingRow]) -> None:
    """Change `logits` [G, V], one row per sequence, in place. Only entries that a step names are touched, in float64.

    Raises BadInput for ids outside the vocabulary and for a mask that does not fit it.
    """
    _mask(logits, rows)
    _penalise(logits, rows)
    _bias(logits, rows)
    _hold_back(logits, rows)


def _mask(logits: Floats, rows: Sequence[SamplingRow]) -> None:
    for place, row in enumerate(rows):
        allowed = row.allowed_mask(logits.shape[1])
        if allowed is not None:
            logits[place, ~allowed] = -np.inf


def _penalise(logits: Floats, rows: Sequence[SamplingRow]) -> None:
    """Repetition for every token seen; frequency per occurrence in the output; presence once if it is there."""
    places = [place for place, row in enumerate(rows) if row.params.has_penalties]
    if not places:
        return
    seen = [rows[place].token_counts() for place in places]
    sizes = [len(one.ids) for one in seen]
    at, ids = np.repeat(places, sizes), _checked(np.concatenate([one.ids for one in seen]), logits.shape[1])
    counts = np.concatenate([one.output_counts for one in seen])

    def spread(name: str) -> NDArray[np.float64]:
        return np.repeat([getattr(rows[place].params, name) for place in places], sizes)

    values, repetition = logits[at, ids].astype(np.float64), spread("repetition_penalty")
    values = np.where(values > 0, values / repetition, values * repetition)
    values -= spread("frequency_penalty") * counts + spread("presence_penalty") * (counts > 0)
    logits[at, ids] = np.minimum(values, _LARGEST)  # a tiny repetition penalty must not make an infinity


def _bias(logits: Floats, rows: Sequence[SamplingRow]) -> None:
    for place, row in enumerate(rows):
        if row.params.logit_bias:
            ids = _checked(row.params.logit_bias, logits.shape[1])
            logits[place, ids] += np.fromiter(row.params.logit_bias.values(), dtype=np.float64)


def _hold_back(logits: Floats, rows: Sequence[SamplingRow]) -> None:
    """Ban tokens that would end the output too early, unless the mask leaves no other: it knows the grammar's end."""
    for place, row in enumerate(rows):
        if not row.held_back:
            continue
        ids = _checked(row.held_back, logits.shape[1])
        before = logits[place, ids]
        logits[place, ids] = -np.inf
        if row.allowed is not None and logits[place].max() == -np.inf:
            logits[place, ids] = before


def _checked(token_ids: Iterable[int] | Ids, vocab_size: int) -> Ids:
    ids = token_ids if isinstance(token_ids, np.ndarray) else np.fromiter(token_ids, dtype=np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise BadInput(f"token ids must be below {vocab_size}", field="token_ids")
    return ids
