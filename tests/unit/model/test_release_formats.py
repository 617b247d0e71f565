"""Made checkpoints in the releases' own formats and files, against transformers on the same weights dequantized."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshfire.model import registry
from meshfire.modelstore.made_configs import MADE_CONFIGS
from meshfire.modelstore.make import make_model
from tests.oracles import load_oracle, oracle_logits
from tests.unit.model.harness import Runner


def all_tensors(directory: Path) -> dict[str, Tensor]:
    return {name: one for path in directory.glob("*.safetensors") for name, one in load_file(path).items()}


def plain_tensors(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every matrix as float32 under its plain name; INT4 by compressed-tensors, FP8 by torch."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    plain: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        stem, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            shape = torch.Size(stored[f"{stem}.weight_shape"].tolist())
            scale = stored[f"{stem}.weight_scale"].float().repeat_interleave(32, dim=1)
            plain[f"{stem}.weight"] = unpack_from_int32(tensor, 4, shape).float() * scale
        elif tensor.dtype == torch.float8_e4m3fn:
            scale = stored[f"{stem}.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            plain[name] = tensor.float() * scale[: tensor.shape[0], : tensor.shape[1]]
        elif not kind.startswith("weight_"):
            plain[name] = tensor.float()
    return plain


def dequantized_text(directory: Path, into: Path) -> Path:
    """The text part as a plain DeepSeek-V3 checkpoint, which transformers reads."""
    config = json.loads((directory / "config.json").read_text())
    text = {**config.get("text_config", config), "model_type": "deepseek_v3", "dtype": "float32"}
    text.pop("quantization_config")
    into.mkdir()
    (into / "config.json").write_text(json.dumps(text))
    named = {name.removeprefix("language_model."): one for name, one in plain_tensors(all_tensors(directory)).items()}
    kept = {name: one for name, one in named.items() if name.startswith(("model.", "lm_head."))}
    save_file(kept, into / "model.safetensors", metadata={"format": "pt"})
    return into


@pytest.mark.parametrize("name", ["kimi-tiny-int4", "kimi-tiny-fp8"])
def test_logits_equal_those_of_the_dequantized_model(name: str, tmp_path: Path) -> None:
    make_model(name, tmp_path / "made")
    oracle = load_oracle(dequantized_text(tmp_path / "made", tmp_path / "plain"))
    ids = torch.randint(0, 1024, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    expected = oracle_logits(oracle, ids)
    runner = Runner.open(tmp_path / "made")
    for found, wanted in ((runner.prefill(ids, 11), expected), (runner.decode(ids[:30], ids[30:]), expected[29:-1])):
        error = (found - wanted).abs().amax(-1) / wanted.abs().amax(-1)
        assert error.max() < 1e-4
    assert expected.std() > 0.5


def test_slices_of_a_quantized_dense_ffn_are_cut_inside_blocks(tmp_path: Path) -> None:
    make_model("kimi-tiny-fp8", tmp_path / "made")
    whole = Runner.open(tmp_path / "made").prefill([5, 6, 7, 8], 4)
    sliced = Runner.open(tmp_path / "made", dense_slices=5).prefill([5, 6, 7, 8], 4)
    torch.testing.assert_close(sliced, whole, rtol=1e-4, atol=1e-4)


def test_the_int4_model_lies_as_the_release_does(tmp_path: Path) -> None:
    make_model("kimi-tiny-int4", tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 64
    tensors = all_tensors(tmp_path)
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in tensors.values())
    files = index["weight_map"]
    assert files["language_model.lm_head.weight"] == "model-00062-of-000064.safetensors"
    assert files["mm_projector.proj.0.weight"] == "model-00063-of-000064.safetensors"
    assert files["vision_tower.patch_embed.pos_emb.weight"] == "model-00064-of-000064.safetensors"
    quantization = MADE_CONFIGS["kimi-tiny-int4"].text["quantization_config"]
    patterns = [one.removeprefix("re:") if one.startswith("re:") else re.escape(one) for one in quantization["ignore"]]
    for name in tensors:
        layer = name.rpartition(".")[0]
        ignored = layer.endswith("lm_head") or any(re.match(pattern, layer) for pattern in patterns)
        assert not (ignored and "packed" in name)
    assert {name.rpartition(".")[2] for name in tensors if ".experts." in name} == {
        "weight_packed",
        "weight_scale",
        "weight_shape",
    }


def test_a_shard_opens_only_the_files_of_its_expert(tmp_path: Path) -> None:
    """All other files are deleted once the headers are read."""
    make_model("kimi-tiny-int4", tmp_path / "made")
    expected = registry.open_experts(tmp_path / "made").load(2, 7)(torch.ones(1, 128))
    files = json.loads((tmp_path / "made" / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for name, file in files.items() if ".layers.2.mlp.experts.7." in name}
    source = registry.open_experts(tmp_path / "made")
    for path in (tmp_path / "made").glob("*.safetensors"):
        if path.name not in needed:
            path.unlink()
    assert torch.equal(source.load(2, 7)(torch.ones(1, 128)), expected)
