"""What a month of requests would cost on this model and on others: the arithmetic behind `meshfire cost`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshfire.errors import BadInput
from meshfire.metering.neurons import Rate, Tokens, dollars, micro_neurons, neurons
from meshfire.metering.prices import PriceTable


@dataclass(frozen=True)
class Workload:
    """So many requests, each with `input_tokens` of which the share `cached` is found, and `output_tokens`."""

    requests: int
    input_tokens: int
    cached: float
    output_tokens: int

    def __post_init__(self) -> None:
        if not 0 <= self.cached <= 1:
            raise BadInput(f"cached is {self.cached:g}, expected a share from 0 to 1", field="cached")
        for name in ("requests", "input_tokens", "output_tokens"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name} is {getattr(self, name)}, expected at least 0", field=name)

    @property
    def tokens(self) -> Tokens:
        """Of all requests."""
        prompt = self.requests * self.input_tokens
        return Tokens(prompt, round(prompt * self.cached), self.requests * self.output_tokens)


@dataclass(frozen=True)
class Cost:
    """Of a workload on one model; `uncached_dollars` is its price if no prefix were found."""

    model: str
    neurons: float
    dollars: float
    uncached_dollars: float


def compare(workload: Workload, models: Sequence[str], table: PriceTable) -> list[Cost]:
    """In the order asked for. Raises BadInput for a model without a price."""
    return [_cost(workload, model, _rate(table, model)) for model in models]


def _rate(table: PriceTable, model: str) -> Rate:
    rate = table.rate(model)
    if rate is None:
        raise BadInput(f"{model} has no price; add it to a price file", field="model")
    return rate


def _cost(workload: Workload, model: str, rate: Rate) -> Cost:
    tokens = workload.tokens
    micro = micro_neurons(tokens, rate)
    uncached = micro_neurons(Tokens(tokens.prompt, 0, tokens.output), rate)
    return Cost(model, neurons(micro), dollars(micro), dollars(uncached))
