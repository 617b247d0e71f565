"""Tokenizers that are a Hugging Face tokenizer.json, run by the `tokenizers` library.

The library would find control tokens in any text. So it gets the file without added tokens and only ever sees plain
text; added tokens are found here (`SpecialTokens`): control tokens in trusted text only, the others, which are white
space or single characters, in all text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from meshfire.errors import CheckpointError
from meshfire.text import byte_level, model_files
from meshfire.text.specials import SpecialToken, SpecialTokens, is_control
from meshfire.text.tokenizer import encode_segments, without_surrogates
from meshfire.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class HfTokenizer:
    """See `meshfire.text.tokenizer.Tokenizer`."""

    vocabulary: Vocabulary
    specials: SpecialTokens
    #: added tokens that control nothing
    literals: SpecialTokens
    end_token_ids: tuple[int, ...]
    checksum: str
    #: for the start of a prompt, and for what follows a control token: some prepend a space only to the former
    first: Library
    later: Library

    @classmethod
    def load(cls, directory: Path) -> HfTokenizer:
        """From a model directory. Raises CheckpointError."""
        content = model_files.read_json(directory, "tokenizer.json")
        added = list(content.get("added_tokens") or ())
        tokens = [_special(token) for token in added]
        ids = {**_model_vocabulary(content), **{str(token["content"]): int(token["id"]) for token in added}}
        plain = _plain(content)
        first = _library(directory, plain)
        later_plain = _never_prepending(plain)
        return cls(
            vocabulary=_vocabulary(content, ids, model_files.model_vocab_size(directory)),
            specials=SpecialTokens.of(tokens),
            literals=SpecialTokens(tuple(token for token in tokens if not is_control(token.content))),
            end_token_ids=model_files.end_token_ids(directory, ids),
            checksum=model_files.checksum(directory),
            first=first,
            later=first if later_plain == plain else _library(directory, later_plain),
        )

    def encode_plain(self, text: str, *, at_start: bool = True) -> list[int]:
        """Token ids, none of them a control token."""
        token_ids: list[int] = []
        for index, segment in enumerate(self.literals.split(without_surrogates(text))):
            if isinstance(segment, SpecialToken):
                token_ids.append(segment.token_id)
            else:
                token_ids.extend(self._encode(segment, self.first if at_start and index == 0 else self.later))
        return token_ids

    def encode_trusted(self, text: str) -> list[int]:
        """Token ids, control tokens included."""
        return encode_segments(self, self.specials.split(text))

    def _encode(self, text: str, library: Library) -> list[int]:
        token_ids: list[int] = library.encode(text, add_special_tokens=False).ids
        if self.specials.ids.isdisjoint(token_ids):
            return token_ids
        # Merges can spell out a control token that is also in the model's own vocabulary. A piece that lacks one of its
        # characters cannot.
        pieces = self.specials.pieces_without(text)
        return [one for piece in pieces for one in self.later.encode(piece, add_special_tokens=False).ids]


def _special(token: Mapping[str, Any]) -> SpecialToken:
    return SpecialToken(
        token_id=int(token["id"]),
        content=str(token["content"]),
        hidden=bool(token.get("special", True)),
        lstrip=bool(token.get("lstrip", False)),
        rstrip=bool(token.get("rstrip", False)),
    )


def _plain(content: Mapping[str, Any]) -> dict[str, Any]:
    """The file without added tokens and without anything else that adds or cuts tokens.

    All of them go: the library numbers those it is given by itself, and rightly only if it is given all.
    """
    return {**content, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}


def _never_prepending(node: Any) -> Any:
    """The file with Metaspace's "prepend a space to the first piece only" turned off."""
    if isinstance(node, list):
        return [_never_prepending(one) for one in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "Metaspace" and node.get("prepend_scheme") == "first":
        return {**node, "prepend_scheme": "never"}
    return {key: value if key == "model" else _never_prepending(value) for key, value in node.items()}


def _library(directory: Path, content: Mapping[str, Any]) -> Library:
    try:
        return Library.from_str(json.dumps(content))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{directory / 'tokenizer.json'} cannot be read: {error}") from None


def _model_vocabulary(content: Mapping[str, Any]) -> dict[str, int]:
    """Token texts and ids of the model part: an object (BPE, WordLevel), or a list of [text, score] (Unigram)."""
    vocabulary = content.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, Mapping):
        return {str(text): int(token_id) for text, token_id in vocabulary.items()}
    return {str(entry[0]): token_id for token_id, entry in enumerate(vocabulary)}


def _vocabulary(content: Mapping[str, Any], ids: Mapping[str, int], model_size: int) -> Vocabulary:
    added = {str(token["content"]) for token in content.get("added_tokens") or ()}
    decode = byte_level.decoder_of(content)
    pieces = [b""] * max(model_size, max(ids.values(), default=-1) + 1)
    for text, token_id in _in_order(ids):
        pieces[token_id] = text.encode() if text in added else decode(text)
    return Vocabulary(pieces)


def _in_order(ids: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    yield from sorted(ids.items(), key=lambda item: item[1])
