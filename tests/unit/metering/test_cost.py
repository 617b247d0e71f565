"""`meshfire cost` against sums done by hand."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from meshfire.cli.cost import cost

ASKED = ["--requests", "1e6", "--input", "2000", "--cached", "0.8", "--output", "300"]


def test_a_million_requests_on_kimi() -> None:
    done = CliRunner().invoke(cost, [*ASKED, "--model", "@cf/moonshotai/kimi-k2.5", "--json"], catch_exceptions=False)
    first, *others = json.loads(done.output)
    # 400 M fresh at $0.60, 1600 M cached at $0.10, 300 M out at $3.00
    assert first["dollars"] == pytest.approx(400 * 0.6 + 1600 * 0.1 + 300 * 3.0, rel=1e-4)
    assert first["uncached_dollars"] == pytest.approx(2000 * 0.6 + 300 * 3.0, rel=1e-4)
    assert len(others) > 20
    assert [one["dollars"] for one in others] == sorted(one["dollars"] for one in others)
    assert "moonshotai/kimi-k2.5" not in [one["model"] for one in others]


def test_the_table_for_people() -> None:
    done = CliRunner().invoke(cost, [*ASKED, "--model", "kimi-k2.5"], catch_exceptions=False)
    assert done.output.splitlines()[1].split() == ["kimi-k2.5", "118,181,700", "1,300.00", "2,099.99", "1.00"]


@pytest.mark.parametrize("wrong", [["--requests", "many"], ["--input", "-1"], ["--cached", "2"], ["--output", "0.5"]])
def test_wrong_numbers_are_refused(wrong: list[str]) -> None:
    done = CliRunner().invoke(cost, [*ASKED, *wrong])
    assert done.exit_code == 2
    assert wrong[0] in done.output
