"""From tensors to a decoder: what every pre-norm architecture has in common.

Owns the names of norms and the order of loading. An architecture brings its attention and its FFNs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshfire.model.decoder import Attention, Decoder, DecoderLayer
from meshfire.model.feed_forward import FeedForward
from meshfire.model.ffn_weights import FfnShape
from meshfire.model.interface import KvGeometry
from meshfire.model.norm import RmsNorm
from meshfire.model.partition import KvColumns
from meshfire.model.tensors import DecoderTensors, LayerTensors


@dataclass(frozen=True)
class Blueprint:
    """Sizes of a decoder. `kv`: the row of a token and layer in the cache; `tied`: the embedding is the head."""

    vocab_size: int
    ffn: FfnShape
    kv: KvColumns
    context_tokens: int
    norm_eps: float
    tied: bool


def assemble(
    blueprint: Blueprint,
    tensors: DecoderTensors,
    attention: Callable[[LayerTensors], Attention],
    feed_forward: Callable[[LayerTensors, int], FeedForward],
    *,
    dense_slices: int,
    block_tokens: int,
) -> Decoder:
    """Load all layers; `feed_forward` gets a layer's tensors and its index. Raises CheckpointError."""
    hidden_size, eps = blueprint.ffn.hidden_size, blueprint.norm_eps

    def layer(index: int) -> DecoderLayer:
        weights = tensors.layer(index)
        return DecoderLayer(
            input_norm=RmsNorm(weights.vector("input_layernorm.weight", hidden_size), eps),
            attention=attention(weights),
            ffn_norm=RmsNorm(weights.vector("post_attention_layernorm.weight", hidden_size), eps),
            ffn=feed_forward(weights, index),
        )

    num_layers = len(blueprint.ffn.num_experts)
    return Decoder(
        geometry=KvGeometry(num_layers, block_tokens, blueprint.kv.rank_width(tensors.partition.size)),
        context_tokens=blueprint.context_tokens,
        experts=blueprint.ffn.layout(dense_slices),
        embedding=tensors.embedding(blueprint.vocab_size, hidden_size),
        layers=[layer(index) for index in range(num_layers)],
        norm=RmsNorm(tensors.norm(hidden_size), eps),
        head=tensors.head(blueprint.vocab_size, hidden_size, tied=blueprint.tied),
    )
