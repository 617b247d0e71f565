"""What the JSON files of a model directory say about text: end tokens, named tokens, sizes, checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshfire.errors import CheckpointError

#: files that decide how text becomes tokens
_TEXT_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer_config.json",
)
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """The file's object; empty if there is no such file. Raises CheckpointError if it cannot be read."""
    path = directory / name
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content


def named_tokens(directory: Path) -> dict[str, str]:
    """Texts of the tokens that have a role: {"eos_token": "<|im_end|>", …}."""
    config = read_json(directory, "tokenizer_config.json")
    texts = {name: _text(config.get(name)) for name in _NAMED}
    return {name: text for name, text in texts.items() if text is not None}


def end_token_ids(directory: Path, ids: Mapping[str, int]) -> tuple[int, ...]:
    """Ids that end an output, the usual one first: of generation_config.json, config.json, then the tokenizer's own."""
    found = [
        *_ids(read_json(directory, "generation_config.json").get("eos_token_id")),
        *_model_end_ids(read_json(directory, "config.json")),
    ]
    text = named_tokens(directory).get("eos_token")
    if text is not None and text in ids:
        found.append(ids[text])
    return tuple(dict.fromkeys(found))


def model_vocab_size(directory: Path) -> int:
    """Rows of the model's output; 0 if config.json does not say."""
    config = read_json(directory, "config.json")
    sizes = (config.get("vocab_size"), _text_config(config).get("vocab_size"))
    return max((size for size in sizes if isinstance(size, int)), default=0)


def checksum(directory: Path) -> str:
    """sha256, hex, over names and contents of the files that decide how text becomes tokens."""
    digest = hashlib.sha256()
    for name in _TEXT_FILES:
        path = directory / name
        if path.is_file():
            digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _model_end_ids(config: Mapping[str, Any]) -> Iterator[int]:
    yield from _ids(config.get("eos_token_id"))
    yield from _ids(_text_config(config).get("eos_token_id"))


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else {}


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, int)]


def _text(value: Any) -> str | None:
    """A token is written as its text or as an object with `content`."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None
