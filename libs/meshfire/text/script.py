"""Scripts of the test hook: what a model is made to say, as token ids.

A script is a JSON object with exactly one of `pieces` (texts), `pieces_hex` (bytes), `steps` (lists of token texts) or
`wants` (a text, said in the longest tokens), and `end`: "eos" (default) or "length".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshfire.errors import BadInput
from meshfire.text.tokenizer import Tokenizer, without_surrogates

_ENDS = {"eos": True, "length": False}


@dataclass(frozen=True)
class Script:
    """Tokens to choose, one a step; then an end token, or the end for length."""

    token_ids: tuple[int, ...]
    ends_with_eos: bool
    #: the bytes to say, of a script that is one text: where a rule binds the output, its tokens are not known before
    wants: bytes | None = None


def parse(script_json: str, tokenizer: Tokenizer) -> Script:
    """Read a script. Raises BadInput whose field is `script` or `script.<key>`."""
    content = _object(script_json)
    end = content.get("end", "eos")
    if not isinstance(end, str) or end not in _ENDS:
        raise _bad("end", f"is {end!r}, not 'eos' or 'length'")
    given = [kind for kind in _KINDS if kind in content]
    if len(given) != 1:
        raise BadInput(f"a script has exactly one of {', '.join(_KINDS)}; found {given or 'none'}", field="script")
    unknown = sorted(set(content) - {"end", *_KINDS})
    if unknown:
        raise _bad(unknown[0], "is not known")
    value = content[given[0]]
    wants = without_surrogates(value).encode() if given == ["wants"] and isinstance(value, str) else None
    return Script(tuple(_KINDS[given[0]](value, tokenizer)), _ENDS[end], wants)


def _pieces(value: Any, tokenizer: Tokenizer) -> list[int]:
    return [one for text in _texts(value, "pieces") for one in _piece(text, tokenizer)]


def _pieces_hex(value: Any, tokenizer: Tokenizer) -> list[int]:
    return [one for text in _texts(value, "pieces_hex") for one in _covered(_from_hex(text), tokenizer, "pieces_hex")]


def _steps(value: Any, tokenizer: Tokenizer) -> list[int]:
    if not isinstance(value, list):
        raise _bad("steps", "is no list of lists of texts")
    return [one for step in value for text in _texts(step, "steps") for one in _piece(text, tokenizer)]


def _wants(value: Any, tokenizer: Tokenizer) -> list[int]:
    if not isinstance(value, str):
        raise _bad("wants", "is no text")
    return _covered(without_surrogates(value).encode(), tokenizer, "wants")


_KINDS: Mapping[str, Callable[[Any, Tokenizer], list[int]]] = {
    "pieces": _pieces,
    "pieces_hex": _pieces_hex,
    "steps": _steps,
    "wants": _wants,
}


def _piece(text: str, tokenizer: Tokenizer) -> list[int]:
    """The one token that is the text, else its tokens in order."""
    exact = tokenizer.vocabulary.token_of(without_surrogates(text).encode())
    return tokenizer.encode_trusted(text) if exact is None else [exact]


def _covered(data: bytes, tokenizer: Tokenizer, key: str) -> list[int]:
    found = tokenizer.vocabulary.cover(data)
    if found is None:
        raise _bad(key, f"has bytes that no token of the vocabulary stands for: {data!r}")
    return found


def _from_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise _bad("pieces_hex", f"has {text!r}, which is not hexadecimal") from None


def _texts(value: Any, key: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise _bad(key, "is no list of texts")
    return value


def _object(script_json: str) -> Mapping[str, Any]:
    try:
        content = json.loads(script_json)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the script is no JSON: {error}", field="script") from None
    if not isinstance(content, dict):
        raise BadInput("the script is no JSON object", field="script")
    return content


def _bad(key: str, what: str) -> BadInput:
    return BadInput(f"the script's {key!r} {what}", field=f"script.{key}")
