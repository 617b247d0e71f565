"""`models inspect`: the release's published numbers from its configuration alone, and files against that forecast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from meshfire.cli.inspecting import size_bytes
from meshfire.cli.models import models
from meshfire.errors import BadInput, CheckpointError
from meshfire.modelstore.inspection import inspect
from meshfire.modelstore.made_configs import MADE_CONFIGS
from meshfire.modelstore.make import make_model
from tests.oracles import make_deepseek_checkpoint, make_llama_checkpoint, make_mistral_checkpoint

K25_TEXT = {
    **MADE_CONFIGS["kimi-tiny-int4"].text,
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 262144,
}
K25_VISION = {
    "patch_size": 14,
    "merge_kernel_size": [2, 2],
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "init_pos_emb_time": 4,
    "vt_num_hidden_layers": 27,
    "vt_num_attention_heads": 16,
    "vt_hidden_size": 1152,
    "vt_intermediate_size": 4304,
    "mm_hidden_size": 1152,
    "text_hidden_size": 7168,
}


@pytest.fixture
def k25(tmp_path: Path) -> Path:
    config = {**MADE_CONFIGS["kimi-tiny-int4"].config, "text_config": K25_TEXT, "vision_config": K25_VISION}
    rope = {**K25_TEXT["rope_scaling"], "original_max_position_embeddings": 4096}
    config["text_config"] = {**K25_TEXT, "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_kimi_k25_has_the_published_sizes(k25: Path) -> None:
    found = inspect(k25, num_shards=8, memory_bytes=[80 * 2**30, 139 * 2**30])
    assert (found.architecture, found.source) == ("kimi_k25", "config.json")
    assert (found.num_tensors, found.num_bytes) == (208_550, 595_148_192_736)
    assert found.text_parameters == 1_026_408_232_448
    assert (found.vision_parameters, found.projector_parameters) == (416_866_032, 54_277_888)
    assert found.num_parameters == 1_026_879_376_368
    assert round(found.active_parameters / 1e9, 2) == 31.69
    assert found.num_experts == 60 * 384
    # 22,020,096 packed, 2,752,512 of scales, and three shapes of 8 bytes
    assert found.expert_bytes == 24_772_608 + 24
    assert found.shard_bytes == 60 * 48 * found.expert_bytes
    assert (found.kv_token_bytes, found.context_tokens) == (70_272, 262_144)
    assert round(found.kv_context_bytes / 2**30, 2) == 17.16
    small, large = found.fits
    assert (small.shard_fits, large.shard_fits) == (True, True)
    assert large.max_experts // 384 == 15
    assert small.worker_fits
    assert small.kv_tokens == (80 * 2**30 - found.worker_bytes) // 70_272
    assert small.min_shards == -(-60 * 384 // (80 * 2**30 // found.expert_bytes))


@pytest.mark.parametrize("name", ["kimi-tiny", "kimi-tiny-int4", "kimi-tiny-fp8", "llama-tiny"])
def test_the_forecast_from_config_alone_is_what_the_files_hold(name: str, tmp_path: Path) -> None:
    make_model(name, tmp_path / "made")
    real = inspect(tmp_path / "made", num_shards=3, memory_bytes=[10**6])
    for path in (tmp_path / "made").glob("*.safetensors*"):
        path.unlink()
    forecast = inspect(tmp_path / "made", num_shards=3, memory_bytes=[10**6])
    assert (real.source, forecast.source) == ("headers", "config.json")
    fields = [one for one in vars(real) if one != "source"]
    assert {one: getattr(real, one) for one in fields} == {one: getattr(forecast, one) for one in fields}


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (make_llama_checkpoint, {"tie_word_embeddings": True, "attention_bias": True}),
        (make_mistral_checkpoint, {"sliding_window": 13}),
        (make_deepseek_checkpoint, {"q_lora_rank": None, "n_shared_experts": 2}),
    ],
)
def test_what_transformers_saves_is_forecast_from_its_configuration(
    make: Any, changes: dict[str, Any], tmp_path: Path
) -> None:
    real = inspect(make(tmp_path, **changes))
    (tmp_path / "model.safetensors").unlink()
    forecast = inspect(tmp_path)
    assert forecast.source == "config.json"
    assert (forecast.num_parameters, forecast.num_bytes) == (real.num_parameters, real.num_bytes)
    assert (forecast.active_parameters, forecast.expert_bytes) == (real.active_parameters, real.expert_bytes)


def test_the_command_prints_tables_and_json(k25: Path) -> None:
    runner = CliRunner()
    shown = runner.invoke(models, ["inspect", str(k25), "--shards", "8", "--memory", "80GiB"])
    assert shown.exit_code == 0
    assert "1,026,879,376,368" in shown.output
    printed = runner.invoke(models, ["inspect", str(k25), "--json", "--memory", "80GiB"])
    assert json.loads(printed.output)["fits"][0]["memory_bytes"] == 80 * 2**30


def test_memory_sizes() -> None:
    assert [size_bytes(one) for one in ("1000", "1.5 GB", "2gib")] == [1000, 1_500_000_000, 2 * 2**30]
    for wrong in ("", "much", "-1GB", "1 GBs"):
        with pytest.raises(BadInput, match="memory"):
            size_bytes(wrong)


def test_a_configuration_without_a_size_is_refused(k25: Path) -> None:
    config = json.loads((k25 / "config.json").read_text())
    del config["vision_config"]["vt_hidden_size"]
    (k25 / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="vt_hidden_size"):
        inspect(k25)
