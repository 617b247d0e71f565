"""Seeded Hugging Face checkpoints and the independent answers to them: `transformers` on the same files, in fp32.

Owns nothing of Meshfire's numerics, so it can disagree with them. Every random part that an initialiser would leave at
0 or 1 (norm weights, correction bias) is drawn too: zeros and ones hide bugs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshfire.modelstore.made_tokenizer import END_TOKEN, token_ids, write_tokenizer

LLAMA: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 144,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-5,
}

DEEPSEEK: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-5,
    "num_nextn_predict_layers": 0,
}

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}


def make_llama_checkpoint(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write a random Llama model directory (fp32, tokenizer included); `overrides` are LlamaConfig fields."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _save(LlamaForCausalLM, LlamaConfig(**_special_ids({**LLAMA, **overrides})), directory, seed)


def make_mistral_checkpoint(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write a random Mistral model directory (fp32, with tokenizer); `overrides` are MistralConfig fields."""
    from transformers import MistralConfig, MistralForCausalLM

    return _save(MistralForCausalLM, MistralConfig(**_special_ids({**LLAMA, **overrides})), directory, seed)


def make_deepseek_checkpoint(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write a random DeepSeek-V3 model directory (fp32, with tokenizer); `overrides` are DeepseekV3Config fields."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return _save(DeepseekV3ForCausalLM, DeepseekV3Config(**_special_ids({**DEEPSEEK, **overrides})), directory, seed)


def load_oracle(directory: Path) -> Any:
    """The `transformers` model of a directory: fp32, eager attention, evaluation mode."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.no_grad()
def oracle_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """Logits of every position: [T, V]."""
    return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]


@torch.no_grad()
def oracle_greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], Tensor]:
    """`num_tokens` greedy tokens and the logits that chose each: ([N], [N, V]). Ignores end tokens."""
    step, cache, tokens, rows = torch.tensor([list(prompt)]), None, [], []
    for _ in range(num_tokens):
        output = model(input_ids=step, cache=cache, use_cache=True)
        cache = output.cache
        rows.append(output.logits[0, -1])
        tokens.append(int(rows[-1].argmax()))
        step = torch.tensor([[tokens[-1]]])
    return tokens, torch.stack(rows)


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draw what initialisers leave constant: norm weights around 1, biases and correction biases around 0."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("norm.weight"):
            tensor.data.copy_(1 + 0.2 * noise)
        elif name.endswith("bias"):
            tensor.data.copy_(0.1 * noise)


def edit_config(directory: Path, **changes: Any) -> None:
    """Change fields of config.json; None removes one."""
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def _special_ids(config: dict[str, Any]) -> dict[str, Any]:
    end = token_ids()[END_TOKEN]
    return {"bos_token_id": None, "pad_token_id": None, "eos_token_id": end, **config}


def _save(model_class: Any, config: Any, directory: Path, seed: int) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
    randomise(model, seed + 1)
    model.save_pretrained(directory)
    write_tokenizer(directory, config.vocab_size)
    return directory
