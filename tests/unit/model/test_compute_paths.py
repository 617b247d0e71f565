"""Models on the int8 and bf16 paths: exact against neighbours and chunks like any, and close to float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshfire.model import registry
from meshfire.modelstore.make import make_model
from tests.unit.model.harness import Runner

NAMES = ["llama-tiny", "kimi-tiny"]
TEXT = Path(__file__).parents[2] / "data" / "harbour.txt"
SMOLLM2 = Path.home() / ".cache/meshfire/models/smollm2-135m-instruct"
WINDOW = 256


@pytest.fixture(scope="module", params=NAMES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / request.param
    make_model(request.param, path)
    return path


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(0, 1024, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(("compute", "slices"), [("int8", 0), ("int8", 2), ("bf16", 0)])
def test_chunks_of_a_prompt_do_not_show(directory: Path, compute: str, slices: int) -> None:
    prompt = prompt_of(70, 1)
    runner = Runner.open(directory, compute=compute, dense_slices=slices)
    whole, whole_kv = runner.prefill(prompt, 70), runner.kv.rows.clone()
    for chunk in (64, 33, 16, 3, 1):
        assert torch.equal(runner.prefill(prompt, chunk), whole)
        assert torch.equal(runner.kv.rows.nan_to_num(), whole_kv.nan_to_num())


@pytest.mark.parametrize("compute", ["int8", "bf16"])
def test_neighbours_in_a_batch_do_not_show(directory: Path, compute: str) -> None:
    prompts = [prompt_of(5 + 3 * index, index) for index in range(16)]
    alone = Runner.open(directory, num_sequences=16, compute=compute)
    expected = [alone.decode(prompt[:-2], prompt[-2:], index)[1] for index, prompt in enumerate(prompts)]
    for size in (1, 2, 3, 8, 16):
        batched = Runner.open(directory, num_sequences=16, compute=compute)
        for index, prompt in enumerate(prompts[:size]):
            batched.step([(index, 0, prompt[:-2])])
        hidden = batched.step([(index, len(prompts[index]) - 2, prompts[index][-2:-1]) for index in range(size)])
        assert torch.equal(batched.model.logits(hidden), torch.stack(expected[:size]))


@pytest.mark.parametrize("compute", ["int8", "bf16"])
def test_logits_are_near_those_of_float32_and_the_revision_is_another(directory: Path, compute: str) -> None:
    prompt = prompt_of(40, 2)
    exact = Runner.open(directory).prefill(prompt, 40)
    rounded = Runner.open(directory, compute=compute).prefill(prompt, 40)
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).norm() < 0.15 * exact.norm()  # a token near a border may go to another expert
    revisions = {one: registry.describe(directory, compute=one).revision for one in ("auto", "fp32", compute)}
    assert revisions["auto"] == revisions["fp32"] != revisions[compute]


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="make model fetches SmolLM2")
@pytest.mark.timeout(300)
def test_perplexity_of_a_text_is_within_one_percent_of_float32() -> None:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(SMOLLM2 / "tokenizer.json")).encode(TEXT.read_text(encoding="utf-8")).ids
    assert len(ids) >= 1000
    windows = [ids[at : at + WINDOW] for at in range(0, len(ids) - 1, WINDOW)]
    exact, rounded = perplexity("fp32", windows), perplexity("int8", windows)
    assert rounded == pytest.approx(exact, rel=0.01)


def perplexity(compute: str, windows: list[list[int]]) -> float:
    """exp of the mean surprise of every token but each window's first."""
    runner = Runner.open(SMOLLM2, compute=compute)
    surprise, count = 0.0, 0
    for window in windows:
        scores = runner.prefill(window, len(window))[:-1].double().log_softmax(-1)
        surprise -= float(scores.gather(1, torch.tensor(window[1:])[:, None]).sum())
        count += len(window) - 1
    return float(torch.tensor(surprise / count).exp())
