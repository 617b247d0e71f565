"""The named configurations of made models, as their config.json says them. Knows no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshfire.modelstore.made_formats import INT4_IGNORE, Format
from meshfire.modelstore.made_tokenizer import END_TOKEN, TEXT_END_TOKEN, token_ids

_IDS = token_ids()
_TOKENS = {"bos_token_id": None, "eos_token_id": _IDS[END_TOKEN], "pad_token_id": _IDS[TEXT_END_TOKEN]}


@dataclass(frozen=True)
class MadeConfig:
    """`config` is config.json; `dtype` that of plain matrices: float32 for tests, bfloat16 where disk counts.

    `form` is how matrices are stored; `num_layer_files` 0 = one file for each layer.
    """

    config: Mapping[str, Any]
    dtype: str
    form: Format = "plain"
    num_layer_files: int = 0

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

#: sizes that are no multiple of an FP8 block
_UNEVEN = {**_KIMI_TINY, "hidden_size": 160, "moe_intermediate_size": 96}

_INT4_WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "observer": "minmax",
    "dynamic": False,
    "actorder": None,
}
_INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _INT4_WEIGHTS,
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": list(INT4_IGNORE),
}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}

_VISION_TINY = {
    "patch_size": 14,
    "merge_kernel_size": [2, 2],
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "init_pos_emb_time": 4,
    "vt_num_hidden_layers": 2,
    "vt_num_attention_heads": 4,
    "vt_hidden_size": 64,
    "vt_intermediate_size": 128,
    "mm_hidden_size": 64,
    "text_hidden_size": 128,
}


def _kimi_int4() -> MadeConfig:
    """K2.5's release: experts in INT4, the rest bfloat16, a vision tower, 64 files."""
    plain = _kimi("bfloat16", _KIMI_TINY, trained_tokens=64, factor=64.0)
    text = {**plain.text, "quantization_config": _INT4}
    return MadeConfig({**plain.config, "text_config": text, "vision_config": _VISION_TINY}, "bfloat16", "int4", 61)


def _kimi_fp8() -> MadeConfig:
    """K2's release of September 2025: text only, all but embedding, head and gates in FP8, 62 files."""
    text = _kimi("bfloat16", _UNEVEN, trained_tokens=64, factor=64.0).text
    return MadeConfig({**text, "dtype": "bfloat16", "quantization_config": _FP8}, "bfloat16", "fp8", 61)


MADE_CONFIGS: Mapping[str, MadeConfig] = {
    "kimi-bench": _kimi("bfloat16", _KIMI_BENCH, trained_tokens=4096, factor=8.0),
    "kimi-tiny": _kimi("float32", _KIMI_TINY, trained_tokens=64, factor=64.0),
    "kimi-tiny-fp8": _kimi_fp8(),
    "kimi-tiny-int4": _kimi_int4(),
    "llama-tiny": MadeConfig(_LLAMA_TINY, "float32"),
}
