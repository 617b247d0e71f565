"""Kimi K2.5 in the release's layout against transformers' own Kimi class, and against its spelling on saving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from meshfire.model import registry
from tests.oracles import DEEPSEEK, YARN, oracle_logits, randomise
from tests.unit.model.harness import Runner

ROPE = {name: value for name, value in YARN.items() if name not in ("rope_type", "rope_theta")}
TEXT = {**DEEPSEEK, "rope_theta": YARN["rope_theta"], "rope_scaling": {"type": "yarn", **ROPE}}
TEXT = {**TEXT, "pad_token_id": 0, "eos_token_id": 258}
VISION = {
    "pos_emb_height": 8,
    "pos_emb_width": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
}


@pytest.fixture(scope="module")
def kimi() -> Any:
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    config = Kimi_K25Config(
        text_config={"model_type": "kimi_k2", **TEXT},
        vision_config=VISION,
        projection_hidden_size=32,
        image_token_id=500,
        video_token_id=501,
        vision_start_token_id=502,
        vision_end_token_id=503,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = Kimi_K25ForConditionalGeneration(config).eval()
    randomise(model, 12)
    return model


def release_tensors(model: Any) -> dict[str, Tensor]:
    """The text part as the release names it, plus one vision tensor that a text reader must pass over."""
    named: dict[str, Tensor] = {"vision_tower.patch_embed.pos_emb.weight": torch.zeros(8, 8, 32)}
    for name, tensor in model.state_dict().items():
        if name.startswith("model.language_model."):
            name = name.replace("model.language_model.", "language_model.model.")
        elif name == "lm_head.weight":
            name = "language_model.lm_head.weight"
        else:
            continue
        named |= split_experts(name, tensor)
    return {name: tensor.contiguous().clone() for name, tensor in named.items()}


def split_experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """transformers stacks experts; the release has three tensors for each."""
    stem, _, kind = name.rpartition(".")
    if kind == "gate_up_proj":
        halves = [(f"{stem}.{index}", one.chunk(2)) for index, one in enumerate(tensor)]
        gates = {f"{stem}.gate_proj.weight": gate for stem, (gate, _) in halves}
        return gates | {f"{stem}.up_proj.weight": up for stem, (_, up) in halves}
    if kind == "down_proj":
        return {f"{stem}.{index}.down_proj.weight": one for index, one in enumerate(tensor)}
    return {name: tensor}


def test_release_names_give_the_logits_of_transformers_kimi(kimi: Any, tmp_path: Path) -> None:
    config = {"model_type": "kimi_k25", "eos_token_id": 257, "text_config": {"model_type": "kimi_k2", **TEXT}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 258, "temperature": 0.6}))
    save_file(release_tensors(kimi), tmp_path / "model.safetensors")
    assert_equal_logits(kimi, tmp_path)
    facts = registry.describe(tmp_path)
    assert facts.end_token_ids == (257, 258)
    assert facts.generation_defaults == {"temperature": 0.6}
    assert facts.experts.num_experts == (0, 16, 16)
    assert facts.context_tokens == 1024


def test_what_transformers_kimi_saves_gives_the_same_logits(kimi: Any, tmp_path: Path) -> None:
    kimi.save_pretrained(tmp_path)
    assert_equal_logits(kimi, tmp_path)


def assert_equal_logits(oracle: Any, directory: Path) -> None:
    """Given tokens, not greedy ones: transformers takes ids from 500 on for pictures."""
    ids = torch.randint(0, 490, (62,), generator=torch.Generator().manual_seed(2)).tolist()
    runner, expected = Runner.open(directory), oracle_logits(oracle, ids)
    torch.testing.assert_close(runner.decode(ids[:30], ids[30:]), expected[29:-1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(runner.prefill(ids, 11), expected, rtol=1e-4, atol=1e-4)
