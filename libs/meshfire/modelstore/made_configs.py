"""The named configurations of made models, as their config.json says them. Knows no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshfire.modelstore.made_tokenizer import END_TOKEN, TEXT_END_TOKEN, token_ids

_IDS = token_ids()
_TOKENS = {"bos_token_id": None, "eos_token_id": _IDS[END_TOKEN], "pad_token_id": _IDS[TEXT_END_TOKEN]}


@dataclass(frozen=True)
class MadeConfig:
    """`config` is config.json; `dtype` that of matrices: float32 for tests, bfloat16 where disk counts."""

    config: Mapping[str, Any]
    dtype: str

    @property
    def text(self) -> Mapping[str, Any]:
        """The decoder's part of the configuration."""
        text: Mapping[str, Any] = self.config.get("text_config", self.config)
        return text


def _kimi(dtype: str, sizes: dict[str, Any], *, trained_tokens: int, factor: float) -> MadeConfig:
    """Kimi K2.5's release layout, text only; positions stretched by YaRN as in the release."""
    text = {
        "model_type": "kimi_k2",
        "architectures": ["DeepseekV3ForCausalLM"],
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": factor,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": trained_tokens,
        },
        "max_position_embeddings": int(trained_tokens * factor),
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        **_TOKENS,
        **sizes,
    }
    release = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "dtype": dtype}
    return MadeConfig({**release, "tie_word_embeddings": False, **_TOKENS, "text_config": text}, dtype)


_KIMI_TINY = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}

#: head, experts and context keep about K2.5's shares of the work; 1.5 GB in bfloat16
_KIMI_BENCH = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

_LLAMA_TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    **_TOKENS,
}

MADE_CONFIGS: Mapping[str, MadeConfig] = {
    "kimi-bench": _kimi("bfloat16", _KIMI_BENCH, trained_tokens=4096, factor=8.0),
    "kimi-tiny": _kimi("float32", _KIMI_TINY, trained_tokens=64, factor=64.0),
    "llama-tiny": MadeConfig(_LLAMA_TINY, "float32"),
}
