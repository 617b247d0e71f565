"""Makes a model directory with seeded random weights: a whole model without a download, for tests and benchmarks.

Owns the order of writing, and that a directory appears complete or not at all. What the weights and the configurations
are is said in `made_weights` and `made_configs`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from meshfire.errors import BadInput, UnknownModel
from meshfire.modelstore.made_configs import MADE_CONFIGS, MadeConfig
from meshfire.modelstore.made_formats import as_stored
from meshfire.modelstore.made_tokenizer import END_TOKEN, TEXT_END_TOKEN, token_ids, write_tokenizer
from meshfire.modelstore.made_weights import parts


def make_model(name: str, directory: Path, *, seed: int = 0) -> None:
    """Write the model `name` (a key of MADE_CONFIGS) to `directory`, which must not exist or be empty.

    The same name and seed give the same bytes. Raises UnknownModel, or BadInput if the directory holds something.
    """
    made = MADE_CONFIGS.get(name)
    if made is None:
        raise UnknownModel(f"no made model is called {name!r}; known are {', '.join(MADE_CONFIGS)}", field="name")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise BadInput(f"{directory} exists and is not an empty folder", field="directory")
    partial = directory.with_name(f".{directory.name}.{token_hex(4)}.making")
    partial.mkdir(parents=True)
    try:
        _write(made, partial, seed)
        os.replace(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write(made: MadeConfig, directory: Path, seed: int) -> None:
    ids = token_ids()
    _write_json(directory / "config.json", made.config)
    _write_json(directory / "generation_config.json", {"eos_token_id": [ids[END_TOKEN], ids[TEXT_END_TOKEN]]})
    write_tokenizer(directory, made.text["vocab_size"])
    _write_weights(directory, made, seed)


def _write_weights(directory: Path, made: MadeConfig, seed: int) -> None:
    """One file at a time is held in memory. Names of files as in sharded releases."""
    files, dtype = parts(made), getattr(torch, made.dtype)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for index, tensors in enumerate(files):
        file = f"model-{index + 1:05}-of-{len(files):06}.safetensors"
        drawn: dict[str, Tensor] = {}
        for tensor in tensors:
            drawn |= as_stored(tensor.name, tensor.draw(seed, dtype), made.form)
        save_file(drawn, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(drawn, file)
        total_bytes += sum(tensor.nbytes for tensor in drawn.values())
    index_document = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index_document)


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2), encoding="utf-8")
