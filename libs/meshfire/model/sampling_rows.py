"""What sampling takes and gives, as values: one sequence's place in a step, and the token chosen for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshfire.errors import BadInput
from meshfire.model.sampling_counts import TokenCounts
from meshfire.model.sampling_params import SamplingParams

#: bool [V], or one bit per token in int32 words [ceil(V / 32)], the lowest bit first
AllowedTokens: TypeAlias = NDArray[np.bool_] | NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class SamplingRow:
    """One sequence of a step. `position`: of the token to choose, counted from the start of the prompt.

    `allowed` restricts the choice, before everything else; None = any token. `counts` are those of `prompt_ids` and
    `output_ids`, for a caller that keeps them; without them they are counted here, and only if a penalty asks.
    """

    params: SamplingParams
    position: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    allowed: AllowedTokens | None = None
    counts: TokenCounts | None = None

    @property
    def held_back(self) -> tuple[int, ...]:
        """Tokens that would end an output which is still shorter than `min_tokens`."""
        params = self.params
        return params.end_token_ids + params.stop_token_ids if len(self.output_ids) < params.min_tokens else ()

    @property
    def is_plain(self) -> bool:
        """The logits are used as they are."""
        params = self.params
        return not (params.has_penalties or params.logit_bias or self.held_back or self.allowed is not None)

    @property
    def is_only_masked(self) -> bool:
        """Tokens are taken away, and the logits of the others are used as they are."""
        params = self.params
        return self.allowed is not None and not (params.has_penalties or params.logit_bias or self.held_back)

    def token_counts(self) -> TokenCounts:
        """The counts that came with it, else made now."""
        return self.counts or TokenCounts(self.prompt_ids, self.output_ids)

    def allowed_mask(self, vocab_size: int) -> NDArray[np.bool_] | None:
        """`allowed` as bool [V]; BadInput if it is of another size or type."""
        mask: NDArray[np.bool_] | NDArray[np.int32] | None = self.allowed
        if mask is None:
            return None
        if mask.dtype == np.int32 and mask.shape == (-(-vocab_size // 32),):
            little_endian = mask.astype("<i4", copy=False).view(np.uint8)
            return np.unpackbits(little_endian, count=vocab_size, bitorder="little").astype(np.bool_)
        if mask.dtype == np.bool_ and mask.shape == (vocab_size,):
            return mask.astype(np.bool_, copy=False)
        raise BadInput(f"a mask of {mask.shape} {mask.dtype} for a vocabulary of {vocab_size}", field="allowed")


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one position, of the logits as the model gave them: before masks,
    penalties, bias, temperature and truncation. `top_*` are the likeliest tokens, best first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Sampled:
    """A chosen token. `logprobs` only if `params.num_logprobs` asks, with so many likeliest tokens."""

    token_id: int
    logprobs: TokenLogprobs | None = None
