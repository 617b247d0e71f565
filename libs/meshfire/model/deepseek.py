"""DeepSeek-V3 architecture, which is also the text part of Kimi K2 and K2.5: latent attention, routed experts.

Owns the reading of its configuration and the names of its tensors. Oracle: transformers `DeepseekV3ForCausalLM`.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshfire.errors import CheckpointError
from meshfire.model.assemble import Blueprint, assemble
from meshfire.model.config import Fields
from meshfire.model.feed_forward import FeedForward, RoutedFfn, SlicedFfn, WholeFfn
from meshfire.model.ffn_weights import FfnShape
from meshfire.model.gate import Gate
from meshfire.model.interface import CausalLM
from meshfire.model.linear import pack
from meshfire.model.mla import Absorption, LatentAttention, MlaShape, QueryProjection
from meshfire.model.norm import RmsNorm
from meshfire.model.partition import KvColumns
from meshfire.model.quantization import check_quantization
from meshfire.model.rope import RopeConfig, rope_config
from meshfire.model.tensors import DecoderTensors, LayerTensors

#: of the two latent norms; transformers applies it whatever `rms_norm_eps` says
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True)
class GateConfig:
    """How experts are chosen; names as in config.json, shortened."""

    top_k: int
    num_groups: int
    topk_groups: int
    normalise: bool
    scaling_factor: float


@dataclass(frozen=True)
class DeepseekSpec:
    """A DeepSeek-V3 configuration. `query_rank` 0 = queries are projected directly."""

    vocab_size: int
    ffn: FfnShape
    num_shared_experts: int
    gate: GateConfig
    attention: MlaShape
    query_rank: int
    attention_bias: bool
    norm_eps: float
    rope: RopeConfig
    rope_interleaved: bool
    tied: bool

    @property
    def context_tokens(self) -> int:
        """Positions the model was made for."""
        return self.rope.context_tokens

    @property
    def window_tokens(self) -> int:
        """0: every token sees all before it."""
        return 0

    @property
    def kv(self) -> KvColumns:
        """The latent and the shared key, which every head needs whole."""
        return KvColumns(self.attention.row_width, 0)

    def build(self, tensors: DecoderTensors, *, dense_slices: int, block_tokens: int) -> CausalLM:
        """Load attention, norms, gates, shared experts, embedding, head, and dense FFNs unless they are sliced."""
        return assemble(
            Blueprint(self.vocab_size, self.ffn, self.kv, self.context_tokens, self.norm_eps, self.tied),
            tensors,
            self._attention,
            lambda weights, index: self._feed_forward(weights, index, dense_slices),
            dense_slices=dense_slices,
            block_tokens=block_tokens,
        )

    def _feed_forward(self, weights: LayerTensors, index: int, dense_slices: int) -> FeedForward:
        num_experts = self.ffn.num_experts[index]
        return self._routed(weights, num_experts) if num_experts else self._dense(weights, dense_slices)

    def _attention(self, weights: LayerTensors) -> LatentAttention:
        shape, mine = self.attention, self.attention.share(weights.partition)
        per_head = shape.nope + shape.value
        heads = weights.partition.share(shape.num_heads, "num_attention_heads")
        kv_b = weights.matrix("self_attn.kv_b_proj", shape.num_heads * per_head, shape.latent)
        my_kv_b = kv_b[heads.start * per_head : heads.stop * per_head]
        out_columns, hidden_size = shape.num_heads * shape.value, self.ffn.hidden_size
        return LatentAttention(
            shape=mine,
            query=self._query(weights),
            latent_norm=RmsNorm(weights.vector("self_attn.kv_a_layernorm.weight", shape.latent), LATENT_NORM_EPS),
            absorption=Absorption.cut(my_kv_b, mine),
            out=weights.output("self_attn.o_proj", hidden_size, out_columns, bias=self.attention_bias),
            rope=self.rope.build(shape.rope, interleaved=self.rope_interleaved),
            scale=(shape.nope + shape.rope) ** -0.5 * self.rope.softmax_factor,
            absorbed_max_tokens=shape.absorbed_max_tokens,
        )

    def _query(self, weights: LayerTensors) -> QueryProjection:
        """The first product yields the query (or its latent) and the KV latent in one go."""
        shape, hidden_size, rank = self.attention, self.ffn.hidden_size, self.query_rank
        query_size = shape.num_heads * (shape.nope + shape.rope)
        kv_sizes = {"self_attn.kv_a_proj_with_mqa": shape.row_width}
        if not rank:
            if self.attention_bias:
                raise CheckpointError("attention_bias without q_lora_rank is not supported", field="attention_bias")
            sizes = {"self_attn.q_proj": query_size} | kv_sizes
            return QueryProjection(weights.linear(hidden_size, sizes, shared=["self_attn.q_proj"]), None, None)
        down = weights.linear(hidden_size, {"self_attn.q_a_proj": rank} | kv_sizes, bias=self.attention_bias)
        norm = RmsNorm(weights.vector("self_attn.q_a_layernorm.weight", rank), LATENT_NORM_EPS)
        up = weights.linear(rank, {"self_attn.q_b_proj": query_size}, shared=["self_attn.q_b_proj"])
        return QueryProjection(down, norm, up)

    def _dense(self, weights: LayerTensors, dense_slices: int) -> FeedForward:
        if dense_slices:
            return SlicedFfn(dense_slices)
        return WholeFfn(weights.packed_ffn("mlp", self.ffn.hidden_size, self.ffn.dense_size))

    def _routed(self, weights: LayerTensors, num_experts: int) -> RoutedFfn:
        gate = Gate(
            weight=pack(weights.matrix("mlp.gate", num_experts, self.ffn.hidden_size)),
            correction_bias=weights.vector("mlp.gate.e_score_correction_bias", num_experts),
            top_k=self.gate.top_k,
            num_groups=self.gate.num_groups,
            topk_groups=self.gate.topk_groups,
            normalise=self.gate.normalise,
            scaling_factor=self.gate.scaling_factor,
        )
        if not self.num_shared_experts:
            return RoutedFfn(gate, None)
        shared_size = self.num_shared_experts * self.ffn.expert_size
        return RoutedFfn(gate, weights.packed_ffn("mlp.shared_experts", self.ffn.hidden_size, shared_size))


def parse(config: Fields) -> DeepseekSpec:
    """Read the config.json of DeepSeek-V3, Kimi K2, or Kimi K2.5 (nested in `text_config`). Raises CheckpointError."""
    text = config.section("text_config") or config
    check_quantization(config, text)
    for name, accepted in _ONLY.items():
        text.expect(name, accepted)
    return DeepseekSpec(
        vocab_size=text.positive("vocab_size"),
        ffn=_ffn_shape(text),
        num_shared_experts=text.integer("n_shared_experts", 1),
        gate=_gate_config(text),
        attention=_mla_shape(text),
        query_rank=text.integer("q_lora_rank", 0),
        attention_bias=text.flag("attention_bias", False),
        norm_eps=text.number("rms_norm_eps", 1e-6),
        rope=rope_config(text),
        rope_interleaved=text.flag("rope_interleave", True),
        tied=text.flag("tie_word_embeddings", False),
    )


_ONLY: dict[str, object] = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}


def _mla_shape(text: Fields) -> MlaShape:
    return MlaShape(
        num_heads=text.positive("num_attention_heads"),
        nope=text.positive("qk_nope_head_dim"),
        rope=text.positive("qk_rope_head_dim"),
        value=text.positive("v_head_dim"),
        latent=text.positive("kv_lora_rank"),
    )


def _ffn_shape(text: Fields) -> FfnShape:
    num_layers, num_experts = text.positive("num_hidden_layers"), text.positive("n_routed_experts")
    num_dense = min(text.integer("first_k_dense_replace", 0), num_layers)
    return FfnShape(
        hidden_size=text.positive("hidden_size"),
        dense_size=text.positive("intermediate_size"),
        expert_size=text.positive("moe_intermediate_size"),
        num_experts=(0,) * num_dense + (num_experts,) * (num_layers - num_dense),
    )


def _gate_config(text: Fields) -> GateConfig:
    num_experts, num_groups = text.positive("n_routed_experts"), text.positive("n_group", 1)
    gate = GateConfig(
        top_k=text.positive("num_experts_per_tok"),
        num_groups=num_groups,
        topk_groups=text.positive("topk_group", 1),
        normalise=text.flag("norm_topk_prob", True),
        scaling_factor=text.number("routed_scaling_factor", 1.0),
    )
    if num_experts % num_groups or (num_groups > 1 and num_experts // num_groups < 2):
        raise CheckpointError(f"n_group is {num_groups}, expected a divisor of {num_experts}", field="n_group")
    if gate.topk_groups > num_groups:
        raise CheckpointError(f"topk_group is {gate.topk_groups}, expected at most {num_groups}", field="topk_group")
    if gate.top_k > num_experts // num_groups * gate.topk_groups:
        raise CheckpointError(f"num_experts_per_tok is {gate.top_k}, too many to choose", field="num_experts_per_tok")
    return gate
