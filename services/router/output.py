"""Tokens of an output as values. Knows neither the wire nor how they came to be."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities at one position; `top_*` best first and of equal length."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class OutputToken:
    """One generated token."""

    token_id: int
    logprobs: Logprobs | None = None


class FinishReason(Enum):
    """Why an output ended by itself."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
