"""A model directory: what is read from it, and what is said of one that cannot be served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshfire.errors import CheckpointError, UnknownExpert
from meshfire.model import registry
from meshfire.modelstore.make import make_model
from tests.oracles import edit_config
from tests.unit.model.harness import Runner


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    for name in ("kimi-tiny", "llama-tiny"):
        make_model(name, root / name)
    return root


@pytest.fixture
def kimi(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made / "kimi-tiny", tmp_path / "kimi")


@pytest.fixture
def llama(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made / "llama-tiny", tmp_path / "llama")


def merge(directory: Path) -> Path:
    """The sharded checkpoint as one file."""
    parts = sorted(directory.glob("*.safetensors"))
    tensors = {name: tensor.clone() for part in parts for name, tensor in load_file(part).items()}
    for path in [*parts, directory / "model.safetensors.index.json"]:
        path.unlink()
    save_file(tensors, directory / "model.safetensors")
    return directory / "model.safetensors"


def test_facts_of_a_model(kimi: Path) -> None:
    facts = registry.describe(kimi)
    assert (facts.architecture, facts.vocab_size, facts.hidden_size) == ("kimi_k25", 1024, 128)
    assert (facts.context_tokens, facts.end_token_ids) == (4096, (256, 258))
    assert facts.experts.num_experts == (0, 16, 16)
    assert registry.describe(kimi, dense_slices=3).experts.num_experts == (3, 16, 16)
    model = registry.load(kimi, block_tokens=8)
    assert (model.geometry.num_layers, model.geometry.block_tokens, model.geometry.row_width) == (3, 8, 40)
    assert (model.vocab_size, model.hidden_size, model.context_tokens) == (1024, 128, 4096)


def test_the_revision_follows_weights_config_and_slices_and_nothing_else(kimi: Path, tmp_path: Path) -> None:
    first = registry.describe(kimi).revision
    assert len(first) == 16
    moved = shutil.copytree(kimi, tmp_path / "elsewhere")
    (moved / "README.md").write_text("not the model")
    assert registry.describe(moved).revision == first
    assert registry.describe(kimi, dense_slices=2).revision != first
    make_model("kimi-tiny", tmp_path / "other", seed=1)
    assert registry.describe(tmp_path / "other").revision != first
    edit_config(moved, eos_token_id=3)
    assert registry.describe(moved).revision != first


def test_one_file_and_several_give_the_same_bits(llama: Path) -> None:
    before = Runner.open(llama).prefill([1, 2, 3], 3)
    merge(llama)
    assert torch.equal(Runner.open(llama).prefill([1, 2, 3], 3), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_computed_in_float32(llama: Path, dtype: torch.dtype) -> None:
    path = merge(llama)
    rounded = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    save_file(rounded, path)
    half = Runner.open(llama).prefill([5, 6, 7], 3)
    save_file({name: tensor.float() for name, tensor in rounded.items()}, path)
    assert torch.equal(Runner.open(llama).prefill([5, 6, 7], 3), half)


def test_stacked_and_separate_experts_are_the_same_experts(kimi: Path) -> None:
    separate = Runner.open(kimi).prefill([9, 8, 7, 6], 4)
    path = merge(kimi)
    tensors = load_file(path)
    for layer in (1, 2):
        stem = f"language_model.model.layers.{layer}.mlp.experts"
        named = {
            kind: [tensors.pop(f"{stem}.{expert}.{kind}_proj.weight") for expert in range(16)]
            for kind in ("gate", "up", "down")
        }
        halves = zip(named["gate"], named["up"], strict=True)
        tensors[f"{stem}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in halves])
        tensors[f"{stem}.down_proj"] = torch.stack(named["down"])
    save_file(tensors, path)
    assert torch.equal(Runner.open(kimi).prefill([9, 8, 7, 6], 4), separate)


def test_an_expert_that_the_model_lacks_is_unknown(kimi: Path) -> None:
    source = registry.open_experts(kimi, dense_slices=2)
    assert source.load(0, 1).num_bytes == 3 * 128 * 128 * 4
    for layer, expert in ((0, 2), (1, 16), (3, 0), (-1, 0), (1, -1)):
        with pytest.raises(UnknownExpert):
            source.load(layer, expert)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            "quantization_config.weight_block_size",
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.type"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.low_freq_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"vocab_size": 1000}, "model.embed_tokens.weight"),
        ({"intermediate_size": 177}, "model.layers.0.mlp.gate_proj.weight"),
        ({"num_hidden_layers": 4}, "model.layers.3.input_layernorm.weight"),
    ],
)
def test_what_a_config_gets_wrong_is_named(llama: Path, changes: dict[str, object], field: str) -> None:
    edit_config(llama, **changes)
    with pytest.raises(CheckpointError) as raised:
        registry.load(llama)
    assert raised.value.field == field
    assert field.rpartition(".")[2] in raised.value.message or "rope" in raised.value.message


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"scoring_func": "softmax"}, "text_config.scoring_func"),
        ({"n_group": 3}, "n_group"),
        ({"topk_group": 2}, "topk_group"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok"),
        ({"kv_lora_rank": None}, "text_config.kv_lora_rank"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "dense"}},
            "text_config.quantization_config.format",
        ),
    ],
)
def test_what_a_kimi_config_gets_wrong_is_named(kimi: Path, changes: dict[str, object], field: str) -> None:
    text = {**json.loads((kimi / "config.json").read_text())["text_config"], **changes}
    edit_config(kimi, text_config=text)
    with pytest.raises(CheckpointError) as raised:
        registry.describe(kimi)
    assert raised.value.field == field


def test_slices_that_make_no_sense_are_refused(llama: Path) -> None:
    for slices in (-1, 65):
        with pytest.raises(CheckpointError, match="dense_slices"):
            registry.describe(llama, dense_slices=slices)


def test_files_that_are_missing_or_broken_are_named(llama: Path) -> None:
    shard = llama / "model-00002-of-000004.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match="truncated"):
        registry.load(llama)
    shard.write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match="00002"):
        registry.describe(llama)
    shard.unlink()
    with pytest.raises(CheckpointError, match="00002"):
        registry.open_experts(llama)
    (llama / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        registry.load(llama)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        registry.load(llama / "nowhere")


def test_an_index_may_not_lead_out_of_its_directory(llama: Path) -> None:
    index = llama / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside"):
        registry.load(llama)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="index"):
        registry.load(llama)


def test_quantized_tensors_and_lost_ones_are_named(llama: Path) -> None:
    path = merge(llama)
    tensors = load_file(path)
    name = "model.layers.1.self_attn.o_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, path)
    with pytest.raises(CheckpointError, match="I8"):
        registry.load(llama)
    del tensors[name]
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as raised:
        registry.load(llama)
    assert raised.value.field == name
