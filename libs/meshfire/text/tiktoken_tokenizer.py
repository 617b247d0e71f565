"""Kimi's tokenizers: a tiktoken.model file (one `base64(bytes) rank` a line) run by the `tiktoken` library.

The pattern that cuts text into words, the 256 slots for control tokens above the ranks and the names of the unnamed
ones are those of the Kimi K2 family (Moonshot AI, `tokenization_kimi.py`).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import tiktoken

from meshfire.errors import CheckpointError
from meshfire.text import model_files
from meshfire.text.specials import SpecialToken, SpecialTokens
from meshfire.text.tokenizer import encode_segments, without_surrogates
from meshfire.text.vocabulary import Vocabulary

NUM_SPECIAL_SLOTS = 256
#: Longer texts are encoded in slices, and longer runs of only white space or only other characters are cut, or the
#: library's backtracking and merging take forever. Part of the family's definition: ids depend on it.
MAX_SLICE_CHARS = 400_000
MAX_RUN_CHARS = 25_000

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_SUFFIX}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_RUN = re.compile(r"\s+|\S+")


@dataclass(frozen=True)
class TiktokenTokenizer:
    """See `meshfire.text.tokenizer.Tokenizer`."""

    vocabulary: Vocabulary
    specials: SpecialTokens
    end_token_ids: tuple[int, ...]
    checksum: str
    library: tiktoken.Encoding

    @classmethod
    def load(cls, directory: Path) -> TiktokenTokenizer:
        """From a model directory. Raises CheckpointError."""
        ranks = read_ranks(directory / "tiktoken.model")
        tokens = list(_special_tokens(directory, len(ranks)))
        ids = {token.content: token.token_id for token in tokens}
        pieces = [b""] * max(len(ranks) + NUM_SPECIAL_SLOTS, model_files.model_vocab_size(directory))
        for piece, rank in ranks.items():
            pieces[rank] = piece
        for token in tokens:
            pieces[token.token_id] = token.content.encode()
        return cls(
            vocabulary=Vocabulary(pieces),
            specials=SpecialTokens.of(tokens),
            end_token_ids=_end_token_ids(directory, ids),
            checksum=model_files.checksum(directory),
            library=tiktoken.Encoding(directory.name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=ids),
        )

    def encode_plain(self, text: str, *, at_start: bool = True) -> list[int]:
        """Token ids, none of them a control token; a prompt's start is like any other place here."""
        if len(text) <= MAX_RUN_CHARS:  # nothing to cut, and the library mends surrogates itself
            return self.library.encode_ordinary(text)
        clean = without_surrogates(text)
        return [one for part in parts(clean) for one in self.library.encode_ordinary(part)]

    def encode_trusted(self, text: str) -> list[int]:
        """Token ids, control tokens included."""
        return encode_segments(self, self.specials.split(text))


def read_ranks(path: Path) -> dict[bytes, int]:
    """Bytes and rank of every token; ranks are 0 to n - 1. Raises CheckpointError."""
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(piece, validate=True): int(rank) for piece, rank in lines}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if sorted(ranks.values()) != list(range(len(lines))):
        raise CheckpointError(f"{path} is incomplete: its ranks are not 0 to {len(lines) - 1}")
    return ranks


def parts(text: str) -> Iterator[str]:
    """The text in pieces that the library can take; one piece in all ordinary cases."""
    for start in range(0, len(text), MAX_SLICE_CHARS):
        part = text[start : start + MAX_SLICE_CHARS]
        cuts = [0, *_run_cuts(part), len(part)]
        yield from (part[a:b] for a, b in pairwise(cuts))


def _run_cuts(text: str) -> Iterator[int]:
    if not _has_long_run(text):
        return
    for run in _RUN.finditer(text):
        yield from range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS)


def _has_long_run(text: str) -> bool:
    """A run that is too long covers a multiple of the limit, so only the runs around those are measured."""
    for place in range(0, len(text), MAX_RUN_CHARS):
        right = _RUN.match(text, place)
        assert right is not None, "every character begins a run"
        is_space, left = text[place].isspace(), place
        while left and text[left - 1].isspace() == is_space and right.end() - left <= MAX_RUN_CHARS:
            left -= 1
        if right.end() - left > MAX_RUN_CHARS:
            return True
    return False


def _special_tokens(directory: Path, start: int) -> Iterator[SpecialToken]:
    named: Mapping[str, Any] = model_files.read_json(directory, "tokenizer_config.json").get("added_tokens_decoder", {})
    for token_id in range(start, start + NUM_SPECIAL_SLOTS):
        facts = named.get(str(token_id), {})
        content = str(facts.get("content", f"<|reserved_token_{token_id}|>"))
        yield SpecialToken(token_id, content, hidden=bool(facts.get("special", True)))


def _end_token_ids(directory: Path, ids: Mapping[str, int]) -> tuple[int, ...]:
    """A turn ends with <|im_end|>, whatever the files beside the vocabulary say."""
    turn_end = [ids["<|im_end|>"]] if "<|im_end|>" in ids else []
    return tuple(dict.fromkeys([*turn_end, *model_files.end_token_ids(directory, ids)]))
