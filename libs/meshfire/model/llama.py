"""Llama architecture (Llama 2 and 3, SmolLM2; Mistral): grouped-query attention, dense SwiGLU FFNs.

Owns the reading of its configuration and the names of its tensors. Oracles: transformers `LlamaForCausalLM`,
`MistralForCausalLM`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshfire.errors import CheckpointError
from meshfire.model.assemble import Blueprint, assemble
from meshfire.model.config import Fields
from meshfire.model.feed_forward import FeedForward, SlicedFfn, WholeFfn
from meshfire.model.ffn_weights import FfnShape
from meshfire.model.gqa import GqaShape, GroupedQueryAttention
from meshfire.model.interface import CausalLM
from meshfire.model.partition import KvColumns
from meshfire.model.quantization import check_quantization
from meshfire.model.rope import RopeConfig, rope_config
from meshfire.model.tensors import DecoderTensors, LayerTensors

_MISTRAL_WINDOW_TOKENS = 4096


@dataclass(frozen=True)
class LlamaSpec:
    """A Llama configuration; names as in config.json, shortened. `window_tokens` 0 = attention over everything."""

    vocab_size: int
    ffn: FfnShape
    attention: GqaShape
    attention_bias: bool
    norm_eps: float
    rope: RopeConfig
    tied: bool
    window_tokens: int = 0

    @property
    def context_tokens(self) -> int:
        """Positions the model was made for."""
        return self.rope.context_tokens

    @property
    def kv(self) -> KvColumns:
        """Keys, then values."""
        return KvColumns(self.attention.row_width, 2)

    def build(self, tensors: DecoderTensors, *, dense_slices: int, block_tokens: int) -> CausalLM:
        """Load attention, norms, embedding, head, and FFNs unless they are sliced."""
        return assemble(
            Blueprint(self.vocab_size, self.ffn, self.kv, self.context_tokens, self.norm_eps, self.tied),
            tensors,
            self._attention,
            lambda weights, _: self._ffn(weights, dense_slices),
            dense_slices=dense_slices,
            block_tokens=block_tokens,
        )

    def _attention(self, weights: LayerTensors) -> GroupedQueryAttention:
        shape, hidden_size = self.attention, self.ffn.hidden_size
        query_size, key_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        sizes = {"self_attn.q_proj": query_size, "self_attn.k_proj": key_size, "self_attn.v_proj": key_size}
        return GroupedQueryAttention(
            shape=shape.share(weights.partition),
            qkv=weights.linear(hidden_size, sizes, bias=self.attention_bias, shared=sizes),
            out=weights.output("self_attn.o_proj", hidden_size, query_size, bias=self.attention_bias),
            rope=self.rope.build(shape.head_dim),
            window_tokens=self.window_tokens,
        )

    def _ffn(self, weights: LayerTensors, dense_slices: int) -> FeedForward:
        if dense_slices:
            return SlicedFfn(dense_slices)
        return WholeFfn(weights.packed_ffn("mlp", self.ffn.hidden_size, self.ffn.dense_size))


def parse(config: Fields) -> LlamaSpec:
    """Read a Llama config.json. Raises CheckpointError naming the field."""
    check_quantization(config)
    config.expect("hidden_act", "silu")
    config.expect("mlp_bias", False)
    hidden_size, num_heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    num_kv_heads = config.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"num_key_value_heads is {num_kv_heads}, expected a divisor of {num_heads}", field="num_key_value_heads"
        )
    return LlamaSpec(
        vocab_size=config.positive("vocab_size"),
        ffn=FfnShape(hidden_size, config.positive("intermediate_size"), 0, (0,) * config.positive("num_hidden_layers")),
        attention=GqaShape(num_heads, num_kv_heads, config.positive("head_dim", hidden_size // num_heads)),
        attention_bias=config.flag("attention_bias", False),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope_config(config),
        tied=config.flag("tie_word_embeddings", False),
    )


def parse_mistral(config: Fields) -> LlamaSpec:
    """Read a Mistral config.json: Llama with a sliding window, which null switches off. Raises CheckpointError."""
    # a file that does not name the field means the architecture's first release
    window = config.integer("sliding_window", 0) if "sliding_window" in config.values else _MISTRAL_WINDOW_TOKENS
    return replace(parse(config), window_tokens=window)
