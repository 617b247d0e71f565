"""Scripts of the test hook."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshfire.errors import BadInput
from meshfire.text.hf_tokenizer import HfTokenizer
from meshfire.text.script import parse
from meshfire.text.tiktoken_tokenizer import TiktokenTokenizer


def said(tokenizer: HfTokenizer | TiktokenTokenizer, **script: Any) -> bytes:
    parsed = parse(json.dumps(script), tokenizer)
    return b"".join(map(tokenizer.vocabulary.bytes_of, parsed.token_ids))


def test_a_piece_that_is_a_token_is_one_step_and_any_other_is_its_tokens(tokenizer: HfTokenizer) -> None:
    parsed = parse('{"pieces": ["<|im_end|>", "the the", "<think>"], "end": "length"}', tokenizer)
    trusted = tokenizer.encode_trusted
    assert list(parsed.token_ids) == trusted("<|im_end|>") + trusted("the the") + trusted("<think>")
    assert not parsed.ends_with_eos


def test_the_end_is_an_end_token_unless_said(tokenizer: HfTokenizer) -> None:
    assert parse('{"pieces": []}', tokenizer).ends_with_eos
    assert parse('{"pieces": [], "end": "eos"}', tokenizer).ends_with_eos


@given(pieces=st.lists(st.binary(max_size=5), max_size=5))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_hex_pieces_say_exactly_their_bytes(tokenizer: HfTokenizer, pieces: list[bytes]) -> None:
    assert said(tokenizer, pieces_hex=[piece.hex() for piece in pieces]) == b"".join(pieces)


@given(text=st.text(max_size=20))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_wanted_text_is_said_in_the_longest_tokens(tokenizer: HfTokenizer, text: str) -> None:
    parsed = parse(json.dumps({"wants": text}), tokenizer)
    left = text.encode()
    pieces = [tokenizer.vocabulary.bytes_of(one) for one in parsed.token_ids]
    for piece in pieces:
        assert left.startswith(piece)
        longer = [one for one in tokenizer.vocabulary.pieces if len(one) > len(piece) and left.startswith(one)]
        assert not longer
        left = left[len(piece) :]
    assert left == b""


def test_steps_are_lists_of_tokens(tokenizer: HfTokenizer) -> None:
    assert said(tokenizer, steps=[["a", "b"], [], ["<think>"]]) == b"ab<think>"


def test_kimis_bytes_that_are_tokens_are_one_step_each(kimi: TiktokenTokenizer) -> None:
    pieces = ["f09f", "a6ab", "20e6", "bd"]
    parsed = parse(json.dumps({"pieces_hex": pieces}), kimi)
    assert b"".join(map(kimi.vocabulary.bytes_of, parsed.token_ids)).hex() == "".join(pieces)
    known = [kimi.vocabulary.token_of(bytes.fromhex(piece)) for piece in pieces]
    assert all(one in parsed.token_ids for one in known if one is not None)


@pytest.mark.parametrize(
    ("script", "field"),
    [
        ("", "script"),
        ("[]", "script"),
        ("{}", "script"),
        ("[" * 100_000, "script"),
        ('{"pieces": ["a"], "wants": "a"}', "script"),
        ('{"pieces": "a"}', "script.pieces"),
        ('{"pieces": [1]}', "script.pieces"),
        ('{"pieces_hex": ["zz"]}', "script.pieces_hex"),
        ('{"steps": ["a"]}', "script.steps"),
        ('{"steps": 3}', "script.steps"),
        ('{"wants": ["a"]}', "script.wants"),
        ('{"pieces": ["a"], "end": "never"}', "script.end"),
        ('{"pieces": ["a"], "end": ["eos"]}', "script.end"),
        ('{"pieces": ["a"], "mask": 1}', "script.mask"),
    ],
)
def test_a_bad_script_is_refused_by_field(tokenizer: HfTokenizer, script: str, field: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse(script, tokenizer)
    assert caught.value.field == field
