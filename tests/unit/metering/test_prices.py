"""How a name leads to a rate, and price files with their errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshfire.errors import BadInput
from meshfire.metering.neurons import Rate
from meshfire.metering.prices import PriceTable

KIMI = Rate(input=54545, output=272727, cached=9091)


@pytest.mark.parametrize(
    "name", ["@cf/moonshotai/kimi-k2.5", "moonshotai/kimi-k2.5", "kimi-k2.5", "@CF/MoonshotAI/Kimi-K2.5"]
)
def test_a_model_is_found_by_every_form_of_its_name(name: str) -> None:
    assert PriceTable().rate(name) == KIMI


def test_a_model_without_a_price_has_none() -> None:
    assert PriceTable().rate("kimi") is None
    assert PriceTable().rate("") is None
    assert PriceTable().rate("someone/k2.5") is None


def test_a_file_adds_and_replaces(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(
        "models: {house/small: {input: 10, output: 20}, '@cf/moonshotai/kimi-k2.5': {input: 1, output: 2, cached: 0}}"
    )
    table = PriceTable.from_file(file)
    assert table.rate("small") == Rate(input=10, output=20)
    assert table.rate("kimi-k2.5") == Rate(input=1, output=2, cached=0)
    assert table.rate("kimi-k2.6") == PriceTable().rate("kimi-k2.6")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("models: {m: {input: -1, output: 2}}", "models.m.input"),
        ("models: {m: {input: 1}}", "models.m.output"),
        ("models: {m: {input: 1, output: 2, per: token}}", "models.m.per"),
        ("- 1", "prices"),
        ("models: [", "prices"),
    ],
)
def test_a_wrong_file_names_the_field(tmp_path: Path, text: str, field: str) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    with pytest.raises(BadInput) as caught:
        PriceTable.from_file(file)
    assert caught.value.field == field


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        PriceTable.from_file(tmp_path / "none.yaml")
