"""The tokenizer of made models: byte-level BPE small enough to be written from nothing.

Owns the files `tokenizer.json` (Hugging Face `tokenizers` format), `tokenizer_config.json` and `chat_template.jinja`
(ChatML). Every id below the vocabulary size is a real token, so whatever a random model says can be shown: 256 bytes,
then the special tokens, then merged letter pairs and triples. Knows nothing of weights.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshfire.errors import CheckpointError

START_TOKEN = "<|im_start|>"
END_TOKEN = "<|im_end|>"
TEXT_END_TOKEN = "<|endoftext|>"
SPECIAL_TOKENS = (TEXT_END_TOKEN, START_TOKEN, END_TOKEN)
#: visible to a skip-special-tokens decoder, as in Kimi K2.5
MARKER_TOKENS = ("<think>", "</think>")

_NUM_BYTES = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def token_ids() -> dict[str, int]:
    """Id of each special and marker token."""
    return {token: _NUM_BYTES + index for index, token in enumerate(SPECIAL_TOKENS + MARKER_TOKENS)}


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write the three files for `vocab_size` ids. Raises CheckpointError if that is too few or too many."""
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(token, index) for token, index in token_ids().items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocab_size),
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_TOKEN,
        "pad_token": TEXT_END_TOKEN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000_000,
    }
    (directory / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _bpe(vocab_size: int) -> dict[str, Any]:
    num_reserved = _NUM_BYTES + len(token_ids())
    vocabulary = {letter: byte for byte, letter in enumerate(_byte_letters())} | token_ids()
    merges = list(itertools.islice(_merges(), max(0, vocab_size - num_reserved)))
    if num_reserved + len(merges) != vocab_size:
        most = num_reserved + sum(1 for _ in _merges())
        raise CheckpointError(f"vocab_size is {vocab_size}, expected {num_reserved} to {most}", field="vocab_size")
    for index, (left, right) in enumerate(merges):
        vocabulary[left + right] = num_reserved + index
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": [list(pair) for pair in merges],
    }


def _merges() -> Iterator[tuple[str, str]]:
    """Pairs (space or letter, letter), then pairs joined with one more letter: 702 + 18,252."""
    letters = string.ascii_lowercase
    space = _byte_letters()[ord(" ")]
    pairs = [(first, second) for first in space + letters for second in letters]
    yield from pairs
    yield from ((first + second, third) for first, second in pairs for third in letters)


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte in byte-level BPE (GPT-2's table, by its rule).

    Bytes that print in Latin-1 stand for themselves; the others take code points from 256 on, in order.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = itertools.count(256)
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(_NUM_BYTES)]


def _added(token: str, index: int) -> dict[str, Any]:
    return {
        "id": index,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": token in SPECIAL_TOKENS,
    }
