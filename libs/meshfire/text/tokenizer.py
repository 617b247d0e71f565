"""The one interface to tokenizers, and the choice of an implementation by the files of a model directory.

Two ways to encode, never mixed up: what a person wrote is *plain*, its control tokens are ordinary text; what a
template or a test script wrote is *trusted*, its control tokens control.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from meshfire.errors import CheckpointError
from meshfire.text.specials import Segment, SpecialToken, SpecialTokens
from meshfire.text.vocabulary import Vocabulary


class Tokenizer(Protocol):
    """A vocabulary and its encoding. Immutable, safe to use from several threads."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Ids and bytes."""

    @property
    def specials(self) -> SpecialTokens:
        """Control tokens."""

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids that end an output, the usual one first."""

    @property
    def checksum(self) -> str:
        """sha256 over the files, hex."""

    def encode_plain(self, text: str, *, at_start: bool = True) -> list[int]:
        """Token ids of a text, none of them a control token. `at_start` = nothing stands before it in the prompt."""

    def encode_trusted(self, text: str) -> list[int]:
        """Token ids of a text whose control tokens are meant."""


def encode_segments(tokenizer: Tokenizer, segments: Iterable[Segment]) -> list[int]:
    """Control tokens as themselves, what is between them as plain text."""
    token_ids: list[int] = []
    for index, segment in enumerate(segments):
        if isinstance(segment, SpecialToken):
            token_ids.append(segment.token_id)
        else:
            token_ids.extend(tokenizer.encode_plain(segment, at_start=index == 0))
    return token_ids


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory: tokenizer.json, else tiktoken.model. Raises CheckpointError."""
    for file_name, load in _loaders():
        if (directory / file_name).is_file():
            return load(directory)
    names = " or ".join(name for name, _ in _loaders())
    raise CheckpointError(f"{directory} has no {names}")


def _loaders() -> tuple[tuple[str, Callable[[Path], Tokenizer]], ...]:
    from meshfire.text.hf_tokenizer import HfTokenizer  # each needs a library that the other does without
    from meshfire.text.tiktoken_tokenizer import TiktokenTokenizer

    return (("tokenizer.json", HfTokenizer.load), ("tiktoken.model", TiktokenTokenizer.load))


def without_surrogates(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which JSON can carry and no encoding can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        pass
    else:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
