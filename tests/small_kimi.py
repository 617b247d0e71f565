"""A tiny vocabulary with Kimi's control tokens: every byte is a token, and a few words are."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from meshfire.text.kimi.markers import Marker
from meshfire.text.tiktoken_tokenizer import TiktokenTokenizer

WORDS = (b"hello", b" world", b'{"city"', b"functions.", b"think", b"\n\n", "你好".encode())
CONTROLS = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    *(marker.value for marker in Marker),
)


def make_small_kimi(directory: Path) -> TiktokenTokenizer:
    """Write the files and load them."""
    entries = [bytes([byte]) for byte in range(256)] + list(WORDS)
    # BPE reaches a word only through its prefixes
    for word in WORDS:
        entries += [word[:end] for end in range(2, len(word)) if word[:end] not in entries]
    lines = [f"{base64.b64encode(entry).decode()} {rank}" for rank, entry in enumerate(entries)]
    (directory / "tiktoken.model").write_text("\n".join(lines) + "\n")
    added = {str(len(entries) + index): {"content": one, "special": True} for index, one in enumerate(CONTROLS)}
    facts = {"added_tokens_decoder": added, "eos_token": "<|im_end|>", "bos_token": "[BOS]"}
    (directory / "tokenizer_config.json").write_text(json.dumps(facts))
    return TiktokenTokenizer.load(directory)
