"""`quantization_config`: the two releases' own blocks pass, any other format is refused with its field."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from meshfire.errors import CheckpointError
from meshfire.model.config import Fields
from meshfire.model.quantization import check_quantization
from meshfire.modelstore.made_configs import MADE_CONFIGS

INT4, FP8 = (MADE_CONFIGS[name].text["quantization_config"] for name in ("kimi-tiny-int4", "kimi-tiny-fp8"))


@pytest.mark.parametrize("block", [INT4, FP8, None])
def test_release_blocks_and_none_pass(block: dict[str, Any] | None) -> None:
    check_quantization(Fields({"quantization_config": block}), Fields({}))


@pytest.mark.parametrize(
    ("block", "path", "value"),
    [
        (FP8, "fmt", "e5m2"),
        (FP8, "weight_block_size", [64, 64]),
        (FP8, "quant_method", "gptq"),
        (INT4, "format", "marlin-24"),
        (INT4, "quantization_status", "frozen"),
        (INT4, "config_groups.group_0.input_activations", {"num_bits": 8}),
        (INT4, "config_groups.group_0.weights", None),
        (INT4, "config_groups.group_0.weights.num_bits", 8),
        (INT4, "config_groups.group_0.weights.type", "float"),
        (INT4, "config_groups.group_0.weights.symmetric", False),
        (INT4, "config_groups.group_0.weights.strategy", "channel"),
        (INT4, "config_groups.group_0.weights.group_size", 128),
        (INT4, "config_groups.group_0.weights.actorder", "group"),
    ],
)
def test_any_other_format_is_refused_with_its_field(block: dict[str, Any], path: str, value: object) -> None:
    changed = copy.deepcopy(block)
    *parents, last = path.split(".")
    inner = changed
    for parent in parents:
        inner = inner[parent]
    inner[last] = value
    with pytest.raises(CheckpointError) as raised:
        check_quantization(Fields({"quantization_config": changed}))
    assert raised.value.field == f"quantization_config.{path}"
