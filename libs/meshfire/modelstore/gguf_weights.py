"""Weights of a GGUF file of the llama architecture, under the names and in the layout of Hugging Face's Llama.

Two things differ between the formats beside names. GGUF stores shapes in reverse. And llama.cpp rotates neighbouring
rows of a head while Hugging Face rotates row i with row i + D/2, so its converter interleaves the two halves of each
head's query and key rows; here that is undone. (Source of the permutation: llama.cpp convert_hf_to_gguf.py, `permute`.)
Knows nothing of tokenizers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt

from meshfire.errors import CheckpointError

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class Heads:
    """Numbers of query heads and of key/value heads."""

    num_heads: int
    num_kv_heads: int


@dataclass(frozen=True)
class Weight:
    """A tensor that is still in the file."""

    name: str
    shape: tuple[int, ...]
    source: gguf.ReaderTensor
    #: heads whose rows are interleaved; 0 = none
    interleaved_heads: int

    def read(self) -> npt.NDArray[np.float32]:
        """The values, dequantised to float32: [*shape]."""
        values = gguf.dequantize(self.source.data, self.source.tensor_type).astype(np.float32, copy=False)
        values = values.reshape(self.shape)
        return halves(values, self.interleaved_heads) if self.interleaved_heads else values


def weights(reader: gguf.GGUFReader, heads: Heads) -> Iterator[Weight]:
    """All tensors of the file. Raises CheckpointError for one that a Llama does not have, or of another type."""
    for tensor in reader.tensors:
        if (kind := tensor.tensor_type.name) not in _KINDS:
            raise CheckpointError(
                f"GGUF tensor {tensor.name} is {kind}, expected one of {', '.join(_KINDS)}", field=tensor.name
            )
        shape = tuple(int(size) for size in reversed(tensor.shape))
        yield Weight(_hf_name(tensor.name), shape, tensor, _interleaved(tensor.name, heads))


def halves(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows of each head from pairs (0, D/2, 1, D/2 + 1, …) to halves (0, 1, …, D/2, …): [N*D, …] → [N*D, …]."""
    paired = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(rows.shape))


def _hf_name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    match = _BLOCK.fullmatch(name)
    if not match or match[2] not in _INNER:
        raise CheckpointError(f"the GGUF file has a tensor {name!r}, which is not of a plain Llama")
    return f"model.layers.{match[1]}.{_INNER[match[2]]}.{match[3]}"


def _interleaved(name: str, heads: Heads) -> int:
    match = _BLOCK.fullmatch(name)
    return {"attn_q": heads.num_heads, "attn_k": heads.num_kv_heads}.get(match[2], 0) if match else 0
