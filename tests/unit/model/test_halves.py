"""A step in two halves: the same bits and the same KV as the whole step, and experts under way while attention runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshfire.model.halves import Overlapped, overlapped
from meshfire.model.interface import ForwardBatch
from meshfire.modelstore.make import make_model
from tests.unit.model.harness import Runner

NAMES = {"llama-tiny": 2, "kimi-tiny": 0}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("made")
    for name in NAMES:
        make_model(name, root / name)
    return {name: root / name for name in NAMES}


def runners(name: str, directories: dict[str, Path], num_sequences: int) -> tuple[Runner, Runner]:
    """(whole steps, every step of two rows or more in halves)."""
    whole, halves = (
        Runner.open(directories[name], dense_slices=NAMES[name], num_sequences=num_sequences) for _ in range(2)
    )
    halves.model = overlapped(halves.model, 2)
    assert isinstance(halves.model, Overlapped)
    return whole, halves


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=8)
@given(steps=st.lists(st.lists(st.integers(0, 40), min_size=3, max_size=3).filter(any), min_size=1, max_size=3))
def test_halves_give_the_bits_of_the_whole(name: str, directories: dict[str, Path], steps: list[list[int]]) -> None:
    whole, halves = runners(name, directories, num_sequences=3)
    firsts = [0, 0, 0]
    seeded = torch.Generator().manual_seed(1)
    for lengths in steps:
        parts = [
            (sequence, firsts[sequence], torch.randint(0, 1024, (length,), generator=seeded).tolist())
            for sequence, length in enumerate(lengths)
            if length
        ]
        assert torch.equal(whole.step(parts), halves.step(parts))
        firsts = [first + length for first, length in zip(firsts, lengths)]
    assert torch.equal(whole.kv.rows.nan_to_num(), halves.kv.rows.nan_to_num())


def test_the_second_half_attends_while_the_experts_of_the_first_are_under_way(directories: dict[str, Path]) -> None:
    _, runner = runners("kimi-tiny", directories, num_sequences=4)
    events: list[str] = []
    local = runner.experts

    class Pending:
        def __init__(self, layer: int, output: Tensor) -> None:
            self.layer, self.output = layer, output

        def result(self) -> Tensor:
            events.append(f"result {self.layer}")
            return self.output

    class Elsewhere:
        def dispatch(self, layer: int, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Pending:
            events.append(f"dispatch {layer} of {len(hidden)}")
            return Pending(layer, local.dispatch(layer, hidden, topk_ids, topk_weights).result())

    write = runner.kv.write

    def noted(layer: int, slots: Tensor, rows: Tensor) -> None:
        events.append(f"attention {layer} of {len(rows)}")
        write(layer, slots, rows)

    runner.kv.write = noted  # type: ignore[method-assign]
    runner.experts = Elsewhere()  # type: ignore[assignment]
    runner.step([(sequence, 0, [sequence]) for sequence in range(3)])
    last = runner.model.geometry.num_layers - 1
    first_expert_layer = next(layer for layer, count in enumerate(runner.model.experts.num_experts) if count)
    begin = events.index(f"dispatch {first_expert_layer} of 1")
    assert events[begin + 1] == f"attention {first_expert_layer} of 2"
    for layer in range(first_expert_layer, last):
        at = events.index(f"dispatch {layer} of 2")
        assert events[at + 1 : at + 5] == [
            f"result {layer}",
            f"attention {layer + 1} of 1",
            f"dispatch {layer + 1} of 1",
            f"result {layer}",
        ]
    assert events[-2:] == [f"result {last}"] * 2


def test_short_steps_stay_whole_and_zero_switches_it_off(directories: dict[str, Path]) -> None:
    runner = Runner.open(directories["kimi-tiny"])
    assert overlapped(runner.model, 0) is runner.model
    seen: list[int] = []
    forward = type(runner.model).forward

    class Counting(type(runner.model)):  # type: ignore[misc]
        def forward(self, batch: ForwardBatch, *others: object) -> Tensor:
            seen.append(len(batch.token_ids))
            return forward(self, batch, *others)  # type: ignore[arg-type]

    runner.model.__class__ = Counting
    runner.model = overlapped(runner.model, 8)
    runner.step([(0, 0, list(range(7)))])
    runner.step([(0, 7, list(range(8)))])
    assert seen == [7]


def test_only_a_decoder_runs_in_halves(directories: dict[str, Path]) -> None:
    model = overlapped(Runner.open(directories["kimi-tiny"]).model, 4)
    with pytest.raises(TypeError, match="Overlapped"):
        overlapped(model, 4)
