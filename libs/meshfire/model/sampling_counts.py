"""Which tokens a sequence holds and how often it generated each: what the penalties need, kept up step by step.

Owns the counts of one sequence; knows no parameters and no logits. Everything in it follows from the prompt and the
output, so that any process can build it anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """Distinct tokens of a sequence in order of first appearance, each with its number of occurrences in the output.

    A new token costs O(1), whatever the length; a token that is only in the prompt has count 0.
    """

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int] = ()) -> None:
        self.num_output_tokens = 0
        self._place: dict[int, int] = {}
        distinct = np.fromiter(dict.fromkeys(prompt_ids), dtype=np.int64)
        self._place.update(zip(distinct.tolist(), range(len(distinct)), strict=True))
        self._ids = distinct
        self._counts = np.zeros(len(distinct), dtype=np.int64)
        self.catch_up(output_ids)

    @property
    def ids(self) -> NDArray[np.int64]:
        """[N], each once."""
        return self._ids[: len(self._place)]

    @property
    def output_counts(self) -> NDArray[np.int64]:
        """[N]: occurrences of each of `ids` in the output."""
        return self._counts[: len(self._place)]

    def catch_up(self, output_ids: Sequence[int]) -> None:
        """Count what `output_ids`, the whole output, has beyond what was counted. Doing it twice changes nothing."""
        for token_id in output_ids[self.num_output_tokens :]:
            self._count(token_id)
        self.num_output_tokens = max(self.num_output_tokens, len(output_ids))

    def with_more(self, output_ids: Sequence[int]) -> TokenCounts:
        """Counts of a longer output; these stay as they are."""
        more = copy(self)
        more._place, more._ids, more._counts = self._place.copy(), self._ids.copy(), self._counts.copy()
        more.catch_up(output_ids)
        return more

    def _count(self, token_id: int) -> None:
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            spare = max(16, place)
            self._ids = np.concatenate([self._ids, np.empty(spare, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(spare, dtype=np.int64)])
        self._ids[place] = token_id
        self._counts[place] += 1
