"""A mesh on the int8 or bf16 path computes, token for token, what the same path computes in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshfire.client import Sampling
from meshfire.testing.in_process import InProcessModel
from tests import oracles
from tests.mesh.asking import ask
from tests.mesh.harness import in_process_mesh

NUM_TOKENS = 12


@pytest.mark.parametrize("compute", ["int8", "bf16"])
async def test_a_mesh_with_shards_gives_the_tokens_of_one_process(compute: str, tmp_path: Path) -> None:
    directory = oracles.make_deepseek_checkpoint(tmp_path / "model")
    prompt = torch.randint(0, 256, (37,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = InProcessModel(directory, max_batch=1, max_tokens=64, compute=compute).greedy([prompt], NUM_TOKENS)[0]
    async with in_process_mesh({"m": directory}, expert_shards=2, compute=compute) as mesh:
        answer = await ask(mesh, prompt, Sampling(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True))
    assert answer.token_ids == expected
