"""Neurons of a request, exactly.

Owns the arithmetic. Rates are whole neurons per million tokens, so a token costs a whole number of micro-neurons and a
sum of costs is the cost of the sum: a ledger adds up, in whatever order and however it is split. Reasoning tokens are
output tokens. Source: Cloudflare's pricing page of Workers AI (1,000 neurons are $0.011, 2026-08-28).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from meshfire.errors import BadInput

MICRO = 1_000_000
DOLLARS_PER_NEURON = Fraction(11, 1_000_000)
#: of an account each day, until 00:00 UTC
FREE_NEURONS_PER_DAY = 10_000


@dataclass(frozen=True)
class Rate:
    """Neurons per million tokens. `cached` = None: cached input costs what input costs."""

    input: int
    output: int
    cached: int | None = None

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise BadInput(f"{name} is {value}, expected at least 0 neurons per million tokens", field=name)


@dataclass(frozen=True)
class Tokens:
    """Tokens that are billed; `cached` of the `prompt` were found in a prefix cache."""

    prompt: int = 0
    cached: int = 0
    output: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.cached <= self.prompt or self.output < 0:
            raise BadInput(f"{self} is no usage: cached tokens are part of the prompt", field="usage")

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(self.prompt + other.prompt, self.cached + other.cached, self.output + other.output)


FREE = Rate(0, 0)


def micro_neurons(tokens: Tokens, rate: Rate) -> int:
    """Cost in millionths of a neuron."""
    cached_rate = rate.input if rate.cached is None else rate.cached
    return (tokens.prompt - tokens.cached) * rate.input + tokens.cached * cached_rate + tokens.output * rate.output


def neurons(micro: int) -> float:
    """As a number for people and JSON."""
    return micro / MICRO


def dollars(micro: int) -> float:
    """What so many micro-neurons cost beyond the free ones."""
    return float(DOLLARS_PER_NEURON * micro / MICRO)
