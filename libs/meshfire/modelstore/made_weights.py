"""Seeded random weights under the names that real releases use.

Owns names, shapes and spread: matrices keep the size of what passes through them, so that logits differ from token to
token and no layer drowns the others. Norm weights and the gate's correction bias are never the neutral 1 and 0, which
would hide a reader that skips them. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from meshfire.modelstore.made_configs import MadeConfig
from meshfire.modelstore.made_tensor import MadeTensor, biased, matrix, norm, unbiased
from meshfire.modelstore.made_vision import projector, tower

_HEAD_SPREAD = 3.0  # logits' standard deviation
_BIAS_SPREAD = 0.1


def parts(made: MadeConfig) -> list[list[MadeTensor]]:
    """All tensors, grouped as files: the layers, one for embedding, final norm and head, then projector and vision.

    The layers have a file each, or as many in all as `made.num_layer_files` says.
    """
    prefix, text = ("language_model." if "text_config" in made.config else ""), made.text
    layer = _kimi_layer if "kv_lora_rank" in text else _llama_layer
    layers = [list(layer(f"{prefix}model.layers.{index}.", index, text)) for index in range(text["num_hidden_layers"])]
    files = _spread(layers, made.num_layer_files) if made.num_layer_files else layers
    files.append(list(_ends(prefix, text)))
    if vision := made.config.get("vision_config"):
        files += [list(projector(vision)), list(tower(vision))]
    return files


def _spread(layers: list[list[MadeTensor]], num_files: int) -> list[list[MadeTensor]]:
    """In order and as evenly as possible, so that a layer crosses files as in a release."""
    tensors = [tensor for layer in layers for tensor in layer]
    bounds = [len(tensors) * index // num_files for index in range(num_files + 1)]
    return [tensors[start:stop] for start, stop in pairwise(bounds)]


def _ends(prefix: str, text: Mapping[str, Any]) -> Iterator[MadeTensor]:
    vocab_size, hidden_size = text["vocab_size"], text["hidden_size"]
    yield MadeTensor(f"{prefix}model.embed_tokens.weight", (vocab_size, hidden_size), 1.0)
    yield norm(f"{prefix}model.norm", hidden_size)
    if not text.get("tie_word_embeddings"):
        yield MadeTensor(f"{prefix}lm_head.weight", (vocab_size, hidden_size), _HEAD_SPREAD * hidden_size**-0.5)


def _llama_layer(prefix: str, index: int, text: Mapping[str, Any]) -> Iterator[MadeTensor]:
    hidden_size = text["hidden_size"]
    head_dim = text.get("head_dim") or hidden_size // text["num_attention_heads"]
    query_size, key_size = (
        text["num_attention_heads"] * head_dim,
        text.get("num_key_value_heads", text["num_attention_heads"]) * head_dim,
    )
    yield from _layer_norms(prefix, hidden_size)
    projection = biased if text.get("attention_bias") else unbiased
    yield from projection(f"{prefix}self_attn.q_proj", (query_size, hidden_size))
    yield from projection(f"{prefix}self_attn.k_proj", (key_size, hidden_size))
    yield from projection(f"{prefix}self_attn.v_proj", (key_size, hidden_size))
    yield from projection(f"{prefix}self_attn.o_proj", (hidden_size, query_size))
    yield from _ffn(f"{prefix}mlp", hidden_size, text["intermediate_size"])


def _kimi_layer(prefix: str, index: int, text: Mapping[str, Any]) -> Iterator[MadeTensor]:
    hidden_size, num_experts = text["hidden_size"], text["n_routed_experts"]
    yield from _layer_norms(prefix, hidden_size)
    yield from _latent_attention(f"{prefix}self_attn.", text)
    if index < text["first_k_dense_replace"]:
        yield from _ffn(f"{prefix}mlp", hidden_size, text["intermediate_size"])
        return
    yield matrix(f"{prefix}mlp.gate", num_experts, hidden_size)
    yield MadeTensor(f"{prefix}mlp.gate.e_score_correction_bias", (num_experts,), _BIAS_SPREAD, exact=True)
    shared_size = text["n_shared_experts"] * text["moe_intermediate_size"]
    yield from _ffn(f"{prefix}mlp.shared_experts", hidden_size, shared_size)
    for expert in range(num_experts):
        yield from _ffn(f"{prefix}mlp.experts.{expert}", hidden_size, text["moe_intermediate_size"])


def _latent_attention(prefix: str, text: Mapping[str, Any]) -> Iterator[MadeTensor]:
    hidden_size, heads = text["hidden_size"], text["num_attention_heads"]
    rank, latent = text.get("q_lora_rank"), text["kv_lora_rank"]
    nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    if rank:
        yield matrix(f"{prefix}q_a_proj", rank, hidden_size)
        yield norm(f"{prefix}q_a_layernorm", rank)
        yield matrix(f"{prefix}q_b_proj", heads * (nope + rope), rank)
    else:
        yield matrix(f"{prefix}q_proj", heads * (nope + rope), hidden_size)
    yield matrix(f"{prefix}kv_a_proj_with_mqa", latent + rope, hidden_size)
    yield norm(f"{prefix}kv_a_layernorm", latent)
    yield matrix(f"{prefix}kv_b_proj", heads * (nope + value), latent)
    yield matrix(f"{prefix}o_proj", hidden_size, heads * value)


def _layer_norms(prefix: str, hidden_size: int) -> Iterator[MadeTensor]:
    yield norm(f"{prefix}input_layernorm", hidden_size)
    yield norm(f"{prefix}post_attention_layernorm", hidden_size)


def _ffn(prefix: str, hidden_size: int, inner_size: int) -> Iterator[MadeTensor]:
    yield matrix(f"{prefix}.gate_proj", inner_size, hidden_size)
    yield matrix(f"{prefix}.up_proj", inner_size, hidden_size)
    yield matrix(f"{prefix}.down_proj", hidden_size, inner_size)
