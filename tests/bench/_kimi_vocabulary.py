"""Kimi's real vocabulary, where its files lie beside the repository or in MESHFIRE_KIMI_DIR, else one made as large."""

from __future__ import annotations

import os
import random
from pathlib import Path

from meshfire.text.tiktoken_tokenizer import TiktokenTokenizer
from meshfire.text.tokenizer import Tokenizer
from tests.letters import LettersTokenizer

NUM_TOKENS = 163_840


def kimi_directory() -> Path | None:
    """None if the files are not there."""
    beside = Path(__file__).parents[3] / "shared" / "data" / "kimi-k2.5"
    found = Path(os.environ.get("MESHFIRE_KIMI_DIR", beside))
    return found if (found / "tiktoken.model").is_file() else None


def kimi_or_made() -> tuple[Tokenizer, str]:
    """The tokenizer, and "real" or "made"."""
    directory = kimi_directory()
    if directory is not None:
        return TiktokenTokenizer.load(directory), "real"
    chance, pieces = random.Random(0), dict.fromkeys(bytes([byte]) for byte in range(256))
    while len(pieces) < NUM_TOKENS - 2:
        word = bytes(chance.choices(b"etaoinshrdlucmfwypvbgkqjxz", k=chance.randint(2, 9)))
        pieces[b" " + word if chance.random() < 0.5 else word] = None
    return LettersTokenizer(list(pieces)), "made"
