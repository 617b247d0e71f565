"""Rotary position embedding: frequencies (plain, linear, llama3, YaRN) and the rotation itself.

Owns reading `rope_scaling`/`rope_theta` and transformers 5's `rope_parameters`. Knows nothing of heads or caches.
Sources: YaRN, arXiv 2309.00071; Llama 3.1's smoothing as in transformers `modeling_rope_utils`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshfire.errors import CheckpointError
from meshfire.model.config import Fields


@dataclass(frozen=True)
class Rope:
    """`inv_freq` [D/2] float32; `attention_factor` multiplies cos and sin; `interleaved` says how pairs are stored."""

    inv_freq: Tensor
    attention_factor: float = 1.0
    interleaved: bool = False

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of `positions` [T]: two of [T, 1, D/2] float32, the 1 for heads.

        The angle is a float32 product, as in transformers; cos and sin are taken in float64, so that vector and scalar
        code paths round to the same float32.
        """
        angle = (positions.to(torch.float32)[:, None] * self.inv_freq).to(torch.float64)[:, None]
        cos, sin = angle.cos() * self.attention_factor, angle.sin() * self.attention_factor
        return cos.to(torch.float32), sin.to(torch.float32)

    def rotate(self, rows: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate `rows` [T, heads, D]. The result is always in split-half order, whatever the stored order was."""
        cos, sin = angles
        a, b = (rows[..., 0::2], rows[..., 1::2]) if self.interleaved else rows.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@dataclass(frozen=True)
class RopeConfig:
    """What a configuration says about positions. `scaling` is the block that names the kind and its numbers."""

    kind: str
    theta: float
    scaling: Fields
    context_tokens: int

    def build(self, dim: int, *, interleaved: bool = False) -> Rope:
        """Frequencies for `dim` rotated dimensions. Raises CheckpointError for an unknown kind."""
        if self.kind not in _KINDS:
            known = ", ".join(sorted(_KINDS))
            raise CheckpointError(f"rope type is {self.kind!r}, expected one of {known}", field="rope_scaling.type")
        inv_freq, factor = _KINDS[self.kind](self, dim)
        return Rope(inv_freq, factor, interleaved)

    @property
    def softmax_factor(self) -> float:
        """What DeepSeek's attention multiplies its softmax scale by: mscale(factor, mscale_all_dim)²."""
        mscale_all_dim = self.scaling.number("mscale_all_dim", 0.0)
        if self.kind == "default" or not mscale_all_dim:
            return 1.0
        return _mscale(self.scaling.number("factor"), mscale_all_dim) ** 2


def rope_config(fields: Fields, *, default_theta: float = 10000.0) -> RopeConfig:
    """Read either spelling. Raises CheckpointError, also for partial rotation, which no architecture here has."""
    context_tokens = fields.integer("max_position_embeddings")
    block = fields.section("rope_parameters") or fields.section("rope_scaling") or Fields({}, "rope_parameters")
    theta = block.number("rope_theta", fields.number("rope_theta", default_theta))
    if block.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError("partial_rotary_factor is not 1, the only value supported", field="partial_rotary_factor")
    kind = block.text("rope_type", block.text("type", "default"))
    return RopeConfig(kind, theta, block, context_tokens)


def _plain(config: RopeConfig, dim: int) -> tuple[Tensor, float]:
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / (config.theta**exponents), 1.0


def _linear(config: RopeConfig, dim: int) -> tuple[Tensor, float]:
    return _plain(config, dim)[0] / config.scaling.number("factor"), 1.0


def _llama3(config: RopeConfig, dim: int) -> tuple[Tensor, float]:
    """Long waves are slowed by `factor`, short ones kept, those between mixed linearly in 1/wavelength."""
    inv_freq, _ = _plain(config, dim)
    scaling = config.scaling
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    turns = scaling.number("original_max_position_embeddings", config.context_tokens) * inv_freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * (keep + (1 - keep) / scaling.number("factor")), 1.0


def _yarn(config: RopeConfig, dim: int) -> tuple[Tensor, float]:
    """Pairs that turn less than `beta_slow` times in the trained context are slowed, above `beta_fast` kept."""
    inv_freq, _ = _plain(config, dim)
    scaling = config.scaling
    trained = scaling.number("original_max_position_embeddings", config.context_tokens)
    factor = scaling.number("factor", config.context_tokens / trained)

    def pair_that_turns(times: float) -> float:
        return dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(config.theta))

    low = pair_that_turns(scaling.number("beta_fast", 32.0))
    high = pair_that_turns(scaling.number("beta_slow", 1.0))
    if scaling.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001  # transformers' guard against one and the same pair
    slowed = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return inv_freq * (1 - slowed) + inv_freq / factor * slowed, _yarn_factor(scaling, factor)


def _yarn_factor(scaling: Fields, factor: float) -> float:
    """Multiplier of cos and sin; 1 when mscale equals mscale_all_dim."""
    mscale, mscale_all_dim = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        inferred = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    else:
        inferred = _mscale(factor, 1.0)
    return scaling.number("attention_factor", inferred)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


_KINDS: dict[str, Callable[[RopeConfig, int], tuple[Tensor, float]]] = {
    "default": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
