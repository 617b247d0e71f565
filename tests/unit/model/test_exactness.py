"""A token's arithmetic does not depend on its neighbours: equal bits alone, in a batch, in chunks, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfire.model.linear import linear, pack
from meshfire.model.mla import LatentAttention
from meshfire.modelstore.make import make_model
from tests.unit.model.harness import Runner

NAMES = ["llama-tiny", "kimi-tiny"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("made")
    for name in NAMES:
        make_model(name, root / name)
    return {name: root / name for name in NAMES}


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(0, 1024, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 70), st.integers(1, 300) | st.integers(1500, 1600), st.integers(1, 80), st.integers(0, 100))
def test_a_row_of_a_product_does_not_depend_on_the_other_rows(num_rows: int, inner: int, outer: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outer, inner, generator=generator)
    rows = torch.randn(num_rows, inner, generator=generator)
    packed = pack(weight)
    product = linear(rows, packed)
    rounding = 3e-7 * inner + 1e-5  # of `inner` float32 additions of numbers around 1
    torch.testing.assert_close(product.double(), rows.double() @ weight.double().T, rtol=1e-5, atol=rounding)
    for row in {0, num_rows // 2, num_rows - 1}:
        assert torch.equal(linear(rows[row : row + 1], packed)[0], product[row])
    assert torch.equal(linear(rows[num_rows // 3 :], packed), product[num_rows // 3 :])


def test_a_product_of_no_rows_and_a_plain_weight_work() -> None:
    weight, bias = torch.randn(5, 7), torch.randn(5)
    assert linear(torch.empty(0, 7), pack(weight)).shape == (0, 5)
    rows = torch.randn(2, 7)
    torch.testing.assert_close(linear(rows, weight, bias), rows @ weight.T + bias)


@pytest.mark.parametrize("name", NAMES)
def test_prefill_in_chunks_and_token_by_token_gives_the_same_bits(name: str, directories: dict[str, Path]) -> None:
    prompt = prompt_of(70, 1)
    runner = Runner.open(directories[name])
    whole, whole_kv = runner.prefill(prompt, 70), runner.kv.rows.clone()
    for chunk in (64, 33, 16, 3, 1):
        assert torch.equal(runner.prefill(prompt, chunk), whole)
        assert torch.equal(runner.kv.rows.nan_to_num(), whole_kv.nan_to_num())


@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_gives_the_same_bits_alone_and_in_a_mixed_batch(name: str, directories: dict[str, Path]) -> None:
    prompts = [prompt_of(length, length) for length in (20, 37, 5)]
    alone = Runner.open(directories[name], num_sequences=3)
    batched = Runner.open(directories[name], num_sequences=3)
    expected = [alone.decode(prompt[:-3], prompt[-3:], index) for index, prompt in enumerate(prompts)]
    hidden = batched.step([(index, 0, prompt[:-3]) for index, prompt in enumerate(prompts)])
    ends = torch.tensor([len(prompt) - 3 for prompt in prompts]).cumsum(0) - 1
    rows = [batched.model.logits(hidden[ends])]
    for back in (3, 2):
        step = [(index, len(prompt) - back, [prompt[-back]]) for index, prompt in enumerate(prompts)]
        rows.append(batched.model.logits(batched.step(step)))
    for index, steps in enumerate(expected):
        assert torch.equal(torch.stack([one[index] for one in rows]), steps)


def test_a_mixed_step_of_one_prompt_chunk_and_decodes_is_the_same(directories: dict[str, Path]) -> None:
    runner = Runner.open(directories["kimi-tiny"], num_sequences=2)
    first, second = prompt_of(50, 3), prompt_of(40, 4)
    expected = runner.prefill(first, 50)[-1], runner.prefill(second, 40)[-1]
    runner.prefill(first[:-1], 49)
    hidden = runner.step([(1, 0, second), (0, 49, first[-1:])])
    logits = runner.model.logits(hidden[[-1, -2]])
    assert torch.equal(logits[0], expected[0])
    assert torch.equal(logits[1], expected[1])


def test_both_forms_of_latent_attention_agree(directories: dict[str, Path]) -> None:
    prompt, outputs, rows = prompt_of(60, 6), [], []
    for limit in (0, 60):
        runner = Runner.open(directories["kimi-tiny"])
        for layer in runner.model.layers:
            assert isinstance(layer.attention, LatentAttention)
            object.__setattr__(layer.attention, "absorbed_max_tokens", limit)
        outputs.append(runner.prefill(prompt, 60))
        rows.append(runner.kv.rows.nan_to_num())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-6, atol=1e-6)


def test_the_forms_of_k25_meet_at_170_new_tokens() -> None:
    from meshfire.model.mla import MlaShape

    assert MlaShape(num_heads=64, nope=128, rope=64, value=128, latent=512).absorbed_max_tokens == 170
