"""From a model directory to a model: which architecture a `config.json` names, and the three ways to open it.

Owns the list of architectures. Knows nothing of their insides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshfire.errors import CheckpointError
from meshfire.model import deepseek, llama
from meshfire.model.checkpoint import Checkpoint
from meshfire.model.compute.choose import choose, resolved
from meshfire.model.config import Fields, read_json, read_optional_json
from meshfire.model.experts import ExpertSource
from meshfire.model.ffn_weights import CheckpointExperts
from meshfire.model.interface import CausalLM, ExpertLayout
from meshfire.model.partition import WHOLE, KvColumns, Partition
from meshfire.model.revision import model_revision
from meshfire.model.spec import ModelSpec
from meshfire.model.tensors import DecoderTensors

ARCHITECTURES: Mapping[str, Callable[[Fields], ModelSpec]] = {
    "deepseek_v3": deepseek.parse,
    "kimi_k2": deepseek.parse,
    "kimi_k25": deepseek.parse,
    "llama": llama.parse,
    "mistral": llama.parse_mistral,
}

_SAMPLING_DEFAULTS = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
)


@dataclass(frozen=True)
class ModelFacts:
    """What a mesh needs to know of a model without loading it.

    `window_tokens` is how many tokens a token sees (0 = all). `end_token_ids` end an output.
    `generation_defaults` are sampling fields of generation_config.json that are set.
    """

    revision: str
    architecture: str
    vocab_size: int
    hidden_size: int
    context_tokens: int
    window_tokens: int
    end_token_ids: tuple[int, ...]
    experts: ExpertLayout
    generation_defaults: Mapping[str, Any]


def describe(directory: Path, *, dense_slices: int = 0, compute: str = "auto") -> ModelFacts:
    """Read configuration and headers only. Raises CheckpointError naming the field, file or tensor, BadInput."""
    config = read_json(directory, "config.json")
    generation = read_optional_json(directory, "generation_config.json")
    spec = _parse(config)
    return ModelFacts(
        revision=model_revision(directory, dense_slices=dense_slices, compute=resolved(compute)),
        architecture=config.text("model_type"),
        vocab_size=spec.vocab_size,
        hidden_size=spec.ffn.hidden_size,
        context_tokens=spec.context_tokens,
        window_tokens=spec.window_tokens,
        end_token_ids=_end_token_ids(config, generation),
        experts=spec.ffn.layout(dense_slices),
        generation_defaults={
            name: generation.values[name] for name in _SAMPLING_DEFAULTS if generation.values.get(name) is not None
        },
    )


def load(
    directory: Path,
    *,
    dense_slices: int = 0,
    block_tokens: int = 16,
    compute: str = "auto",
    partition: Partition = WHOLE,
) -> CausalLM:
    """Load a decoder without routed experts, and without dense FFNs if they are cut into `dense_slices` > 0 slices.

    `compute` names the path of its arithmetic; `partition` is the share of heads, neurons and columns that this process
    has; `kv_columns` says how wide its KV rows are. Raises CheckpointError naming the field, file or tensor, BadInput.
    """
    spec = _parse(read_json(directory, "config.json"))
    spec.ffn.layout(dense_slices)
    tensors = DecoderTensors.find(Checkpoint(directory), choose(compute), partition)
    return spec.build(tensors, dense_slices=dense_slices, block_tokens=block_tokens)


@dataclass(frozen=True)
class ModelSize:
    """What a configuration alone says: experts of each layer, context, numbers per token and layer in the KV."""

    num_experts: tuple[int, ...]
    context_tokens: int
    kv_row_width: int


def size_of(directory: Path) -> ModelSize:
    """Read config.json only: no weight file needs to be there. Raises CheckpointError."""
    spec = _parse(read_json(directory, "config.json"))
    return ModelSize(spec.ffn.num_experts, spec.context_tokens, spec.kv.row_width)


def kv_columns(directory: Path) -> KvColumns:
    """The KV row of a token and layer, and how ranks share it. Raises CheckpointError."""
    return _parse(read_json(directory, "config.json")).kv


def open_experts(directory: Path, *, dense_slices: int = 0, compute: str = "auto") -> ExpertSource:
    """The model's experts, read one at a time. Raises CheckpointError, BadInput."""
    spec = _parse(read_json(directory, "config.json"))
    spec.ffn.layout(dense_slices)
    tensors = DecoderTensors.find(Checkpoint(directory), choose(compute))
    return CheckpointExperts(tensors, spec.ffn, dense_slices)


def _parse(config: Fields) -> ModelSpec:
    name = config.text("model_type")
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(f"model_type is {name!r}, expected one of {known}", field="model_type")
    return ARCHITECTURES[name](config)


def _end_token_ids(config: Fields, generation: Fields) -> tuple[int, ...]:
    """Both files' ids: Kimi K2.5 names `[EOS]` in one and `<|im_end|>` in the other, and stops on either."""
    own = config.integers("eos_token_id")
    if not own and (text := config.section("text_config")):
        own = text.integers("eos_token_id")
    return tuple(sorted({*own, *generation.integers("eos_token_id")}))
