"""Metadata of a GGUF file of the llama architecture, as Hugging Face's config.json and its neighbours say it.

Knows nothing of weights. Raises CheckpointError for what it cannot say faithfully.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

from meshfire.errors import CheckpointError
from meshfire.modelstore.gguf_weights import Heads

Facts = Mapping[str, Any]


def facts_of(reader: gguf.GGUFReader) -> Facts:
    """All metadata by key."""
    facts = {name: field.contents() for name, field in reader.fields.items()}
    if facts.get("general.architecture") != "llama":
        raise CheckpointError(f"GGUF architecture {facts.get('general.architecture')!r}: only 'llama' can be converted")
    if facts.get("llama.rope.scaling.type", "none") != "none":
        raise CheckpointError("GGUF with a scaled rotary embedding cannot be converted")
    if facts.get("llama.expert_count", 0):
        raise CheckpointError("GGUF with experts cannot be converted")
    return facts


def wanted(facts: Facts, key: str) -> Any:
    """A value that must be there."""
    if key not in facts:
        raise CheckpointError(f"the GGUF file lacks {key}")
    return facts[key]


def heads(facts: Facts) -> Heads:
    """Numbers of heads."""
    num_heads = int(wanted(facts, "llama.attention.head_count"))
    return Heads(num_heads, int(facts.get("llama.attention.head_count_kv", num_heads)))


def model_config(facts: Facts, *, tied: bool, biased_attention: bool) -> dict[str, Any]:
    """config.json. `tied`: the file has no output matrix of its own."""
    count, width = heads(facts), int(wanted(facts, "llama.embedding_length"))
    head_dim = int(facts.get("llama.attention.key_length", width // count.num_heads))
    if int(facts.get("llama.rope.dimension_count", head_dim)) != head_dim:
        raise CheckpointError("GGUF with a rotary embedding over part of a head cannot be converted")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(wanted(facts, "tokenizer.ggml.tokens")),
        "hidden_size": width,
        "intermediate_size": int(wanted(facts, "llama.feed_forward_length")),
        "num_hidden_layers": int(wanted(facts, "llama.block_count")),
        "num_attention_heads": count.num_heads,
        "num_key_value_heads": count.num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(wanted(facts, "llama.context_length")),
        "rms_norm_eps": shortest(wanted(facts, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": shortest(facts.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "attention_bias": biased_attention,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        **_token_ids(facts),
    }


def generation_config(facts: Facts) -> dict[str, Any]:
    """generation_config.json."""
    return _token_ids(facts)


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 → 1e-05, which is what the author wrote."""
    return float(str(np.float32(value)))


def _token_ids(facts: Facts) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    keys = {name: f"tokenizer.ggml.{short}_token_id" for name, short in names.items()}
    return {name: int(facts[key]) for name, key in keys.items() if key in facts}
