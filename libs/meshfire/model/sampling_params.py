"""How tokens are chosen, as one validated value. Owns ranges; every field is resolved, so nobody else has defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshfire.errors import BadInput


@dataclass(frozen=True)
class SamplingParams:
    """Fields, ranges and defaults as in `meshfire.api.common.v1.SamplingParams`; BadInput names a field out of range.

    `seed` is any 64-bit integer. `end_token_ids` are the model's own end tokens: with `stop_token_ids` they cannot be
    chosen before `min_tokens` tokens are out. `max_tokens` and `ignore_eos` are carried for the engine.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    end_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _within("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _within("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _within("temperature", self.temperature, 0, 5)
        _within("top_p", self.top_p, 0, 1, above=True)
        _within("top_k", self.top_k, 0, 2**31 - 1)
        _within("min_p", self.min_p, 0, 1)
        _within("seed", self.seed, -(2**63), 2**64 - 1)
        _within("presence_penalty", self.presence_penalty, -2, 2)
        _within("frequency_penalty", self.frequency_penalty, -2, 2)
        _within("repetition_penalty", self.repetition_penalty, 0, 2, above=True)
        _within("num_logprobs", self.num_logprobs, 0, 20)
        for token, bias in self.logit_bias.items():
            _within(f"logit_bias[{token}]", bias, -100, 100)

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits of the next one."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _within(name: str, value: float | None, low: float, high: float, *, above: bool = False) -> None:
    """Written so that NaN is outside."""
    if value is None or (low <= value <= high and not (above and value == low)):
        return
    expected = f"above {low} and at most {high}" if above else f"{low} to {high}"
    raise BadInput(f"{name} is {value}, expected {expected}", field=name)
