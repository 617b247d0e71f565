"""What `quantization_config` may say for the weights to be readable here.

Owns the two accepted formats: compressed-tensors `pack-quantized` (4 bits, symmetric, groups of 32) and `fp8` (e4m3,
blocks of 128 x 128). Which tensors are quantized is seen from the checkpoint, not from the list of exceptions.
"""

from __future__ import annotations

from meshfire.errors import CheckpointError
from meshfire.model.config import Fields
from meshfire.model.stored_fp8 import BLOCK_SIZE
from meshfire.model.stored_int4 import GROUP_SIZE


def check_quantization(*sections: Fields) -> None:
    """Raise CheckpointError naming the field that announces a format other than the two. None at all is fine."""
    for section in sections:
        if quantization := section.section("quantization_config"):
            _check(quantization)


def _check(quantization: Fields) -> None:
    method = quantization.text("quant_method")
    if method == "fp8":
        quantization.expect("fmt", "e4m3")
        quantization.expect("weight_block_size", [BLOCK_SIZE, BLOCK_SIZE])
    elif method == "compressed-tensors":
        _check_packed(quantization)
    else:
        field = f"{quantization.path}.quant_method"
        raise CheckpointError(f"{field} is {method!r}, expected 'compressed-tensors' or 'fp8'", field=field)


def _check_packed(quantization: Fields) -> None:
    quantization.expect("format", "pack-quantized")
    quantization.expect("quantization_status", "compressed")
    groups = quantization.section("config_groups") or Fields({}, f"{quantization.path}.config_groups")
    for name in groups.values:
        group = groups.section(name)
        weights = group and group.section("weights")
        if group is None or weights is None:
            raise CheckpointError(f"{groups.path}.{name} has no weights", field=f"{groups.path}.{name}.weights")
        group.expect("input_activations", None)
        weights.expect("num_bits", 4)
        weights.expect("type", "int")
        weights.expect("symmetric", True)
        weights.expect("strategy", "group")
        weights.expect("group_size", GROUP_SIZE)
        weights.expect("actorder", None)
