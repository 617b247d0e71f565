"""Costs against the published dollar prices, and what a ledger rests on: the cost of a sum is the sum of costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfire.errors import BadInput
from meshfire.metering.neurons import FREE_NEURONS_PER_DAY, MICRO, Rate, Tokens, dollars, micro_neurons, neurons
from meshfire.metering.prices import PriceTable

#: published dollars per million tokens: (input, cached, output)
PUBLISHED = {
    "@cf/moonshotai/kimi-k2.5": (0.600, 0.100, 3.000),
    "moonshotai/kimi-k2.6": (0.950, 0.160, 4.000),
    "moonshotai/kimi-k2.7-code": (0.950, 0.190, 4.000),
    "openai/gpt-oss-120b": (0.350, 0.350, 0.750),
    "zai-org/glm-5.3": (1.400, 0.260, 4.400),
    "meta/llama-3.3-70b-instruct-fp8-fast": (0.293, 0.293, 2.253),
    "meta/llama-3.2-1b-instruct": (0.027, 0.027, 0.201),
    "deepseek-ai/deepseek-v4-pro-0813": (1.320, 0.044, 3.960),
    "qwen/qwq-32b": (0.660, 0.660, 1.000),
    "ibm-granite/granite-4.0-h-micro": (0.017, 0.017, 0.112),
}
MILLION = 1_000_000


@pytest.mark.parametrize(("model", "published"), PUBLISHED.items())
def test_prices_are_the_published_dollars(model: str, published: tuple[float, float, float]) -> None:
    rate = PriceTable().rate(model)
    assert rate is not None
    kinds = (Tokens(prompt=MILLION), Tokens(prompt=MILLION, cached=MILLION), Tokens(output=MILLION))
    for tokens, price in zip(kinds, published, strict=True):
        assert dollars(micro_neurons(tokens, rate)) == pytest.approx(price, abs=0.0006)


def test_the_free_neurons_of_a_day_on_kimi() -> None:
    rate = PriceTable().rate("kimi-k2.5")
    assert rate is not None
    budget = FREE_NEURONS_PER_DAY * MICRO
    assert budget / micro_neurons(Tokens(prompt=1), rate) == pytest.approx(183_000, rel=0.01)
    assert budget / micro_neurons(Tokens(output=1), rate) == pytest.approx(36_700, rel=0.01)


@st.composite
def usages(draw: st.DrawFn) -> Tokens:
    prompt = draw(st.integers(0, 300_000))
    return Tokens(prompt, draw(st.integers(0, prompt)), draw(st.integers(0, 300_000)))


rates = st.builds(Rate, st.integers(0, 700_000), st.integers(0, 700_000), st.none() | st.integers(0, 700_000))


@given(st.lists(usages(), max_size=8), rates)
def test_the_cost_of_a_sum_is_the_sum_of_costs(many: list[Tokens], rate: Rate) -> None:
    assert micro_neurons(sum(many, Tokens()), rate) == sum(micro_neurons(one, rate) for one in many)


@given(usages(), st.integers(0, 700_000), st.integers(0, 700_000), st.integers(0, 700_000))
def test_a_cached_token_costs_its_own_rate(tokens: Tokens, dear: int, cheap: int, output: int) -> None:
    discounted = micro_neurons(tokens, Rate(dear, output, cheap))
    assert micro_neurons(tokens, Rate(dear, output)) - discounted == tokens.cached * (dear - cheap)


def test_neurons_are_told_as_a_number() -> None:
    rate = Rate(input=54545, output=272727, cached=9091)
    assert neurons(micro_neurons(Tokens(2000, 1600, 300), rate)) == pytest.approx(400 * 0.054545 + 14.5456 + 81.8181)


def test_what_is_no_usage_is_refused() -> None:
    with pytest.raises(BadInput):
        Tokens(prompt=3, cached=4)
    with pytest.raises(BadInput):
        Rate(input=1, output=-1)
