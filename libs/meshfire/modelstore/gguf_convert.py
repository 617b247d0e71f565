"""A GGUF file to a Hugging Face model directory. Puts the parts together; each part's rules are in its own module.

Quantised weights are dequantised to float32: a 4-bit value times a float16 scale plus a float16 offset has more
significant bits than bfloat16 or float16 holds, so anything less would be a second rounding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf

from meshfire.errors import CheckpointError
from meshfire.modelstore import gguf_facts, gguf_tokenizer, safetensors_writer
from meshfire.modelstore.gguf_weights import weights
from meshfire.modelstore.progress import Progress, silent


def convert(source: Path, directory: Path, progress: Progress = silent) -> None:
    """Write config, weights, tokenizer, chat template and generation defaults into `directory`.

    Raises CheckpointError for a file that is damaged or that holds more than a plain Llama.
    """
    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise CheckpointError(f"{source.name} is no GGUF file: {error}") from None
    facts = gguf_facts.facts_of(reader)
    found = list(weights(reader, gguf_facts.heads(facts)))
    names = {weight.name for weight in found}
    config = gguf_facts.model_config(
        facts,
        tied="lm_head.weight" not in names,
        biased_attention="model.layers.0.self_attn.q_proj.bias" in names,
    )
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", gguf_facts.generation_config(facts))
    _write_json(directory / "tokenizer_config.json", gguf_tokenizer.tokenizer_config(facts))
    gguf_tokenizer.tokenizer(facts).save(str(directory / "tokenizer.json"))
    if template := facts.get("tokenizer.chat_template"):
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    safetensors_writer.write(
        directory / "model.safetensors", found, lambda done, total: progress("convert", done, total)
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
