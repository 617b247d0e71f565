"""How tokenizer.json writes the bytes of a token as text, undone.

Byte-level vocabularies print each byte as one visible character (GPT-2's table: printable Latin-1 as itself, the other
68 values from U+0100 on). SentencePiece-like ones write "▁" for a space and "<0x0A>" for a byte without a character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshfire.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


def _character_of_byte() -> Iterator[tuple[int, str]]:
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    replacement = 0x100
    for byte in range(0x100):
        if byte in visible:
            yield byte, chr(byte)
        else:
            yield byte, chr(replacement)
            replacement += 1


_BYTE_OF_CHARACTER = {character: byte for byte, character in _character_of_byte()}


def decoder_of(content: Mapping[str, Any]) -> Callable[[str], bytes]:
    """The function from token text to bytes that fits a tokenizer.json. Raises CheckpointError for an unknown kind."""
    kinds = set(_kinds(content.get("decoder")))
    if "ByteLevel" in kinds:
        return byte_level
    if "ByteFallback" in kinds:
        return byte_fallback
    if "Metaspace" in kinds:
        return metaspace
    raise CheckpointError(f"tokenizer.json has the decoder {sorted(kinds) or None}: only byte-level, byte-fallback and "
                          "metaspace ones can be streamed")  # fmt: skip


def byte_level(token: str) -> bytes:
    """Bytes of a token of a byte-level vocabulary; a token with other characters stands for itself."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()


def byte_fallback(token: str) -> bytes:
    """Bytes of a token where "<0xNN>" is a byte and "▁" a space."""
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else metaspace(token)


def metaspace(token: str) -> bytes:
    """Bytes of a token where "▁" is a space."""
    return token.replace(_SPACE, " ").encode()


def _kinds(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        yield str(node.get("type"))
        for part in node.get("decoders", ()):
            yield from _kinds(part)
