r"""Patterns as ECMA-262 means them: `re` with re.ASCII is the oracle."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfire.grammar.compiler import GrammarCompiler
from meshfire.grammar.constraint import Constraint
from meshfire.grammar.patterns import ascii_classes, with_ascii_classes
from meshfire.grammar.rules import JsonRule, OutputRule, RegexRule
from meshfire.text.tiktoken_tokenizer import TiktokenTokenizer

ATOMS = st.sampled_from(
    ["a", r"\d", r"\w", r"\D", r"\W", r"\\", r"\[", r"\]", r"[\d.]", r"[^\w-]", r"[a\]\d]", r"\.", "x"]
)
PATTERNS = st.lists(ATOMS, min_size=1, max_size=4).map("".join)


@given(PATTERNS, st.text(st.sampled_from("aZ09_.-[]\\x ٣é你"), max_size=5))
def test_it_matches_what_the_original_matches_in_ascii(pattern: str, text: str) -> None:
    expected = re.fullmatch(pattern, text, re.ASCII) is not None
    assert (re.fullmatch(ascii_classes(pattern), text) is not None) == expected


def test_only_patterns_are_rewritten() -> None:
    schema = {
        "properties": {"pattern": {"pattern": r"\d"}, r"\d": {"const": {"pattern": r"\d"}}},
        "patternProperties": {r"\w": {"items": {"pattern": r"\w"}}},
        "anyOf": [{"pattern": r"\D"}],
        "description": r"\d",
    }
    assert with_ascii_classes(schema) == {
        "properties": {"pattern": {"pattern": "[0-9]"}, r"\d": {"const": {"pattern": r"\d"}}},
        "patternProperties": {"[A-Za-z0-9_]": {"items": {"pattern": "[A-Za-z0-9_]"}}},
        "anyOf": [{"pattern": "[^0-9]"}],
        "description": r"\d",
    }


@pytest.mark.parametrize("rule", [RegexRule(r"\d"), JsonRule({"type": "string", "pattern": r"^\d$"})])
def test_masks_allow_ascii_digits_only(small_kimi: TiktokenTokenizer, rule: RegexRule | JsonRule) -> None:
    under = Constraint(GrammarCompiler(small_kimi).compile(OutputRule(rule)), in_reasoning=False)
    if isinstance(rule, JsonRule):
        under.accept(ord('"'))
    mask = under.mask()
    assert mask is not None
    allowed = b"".join(small_kimi.vocabulary.bytes_of(int(one)) for one in np.flatnonzero(mask[:256]))
    assert allowed.replace(b"\\", b"") == b"0123456789"
