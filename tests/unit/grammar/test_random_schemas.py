"""Any schema that is taken: whatever a random model writes under it validates, judged by `jsonschema`."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfire.errors import BadInput
from meshfire.grammar.compiler import GrammarCompiler
from meshfire.grammar.constraint import Constraint
from meshfire.grammar.rules import JsonRule, OutputRule
from meshfire.text.tiktoken_tokenizer import TiktokenTokenizer

NAMES = st.sampled_from(["a", "city", "x y", "über", '"', "\\", "n\n"])
STRINGS = st.builds(
    lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
    st.integers(0, 3),
    st.integers(0, 4),
)
PATTERNS = st.sampled_from(["^[a-c]{1,3}$", "^\\d{2}-\\d$", "^(ab|cd)+$", "x"]).map(
    lambda one: {"type": "string", "pattern": one, "maxLength": 12}
)
INTEGERS = st.builds(
    lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
    st.integers(-200, 200),
    st.integers(0, 300),
)
NUMBERS = st.builds(
    lambda low, more: {"type": "number", "minimum": low, "exclusiveMaximum": low + more},
    st.integers(-20, 20),
    st.integers(1, 50),
)
VALUES = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.sampled_from(["", "a", "é\n"]))
ENUMS = st.lists(VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values})
FORMATS = st.sampled_from(["date", "time", "date-time", "uuid", "ipv4"]).map(
    lambda one: {"type": "string", "format": one}
)
LEAVES = st.one_of(
    STRINGS, PATTERNS, INTEGERS, NUMBERS, ENUMS, FORMATS, st.sampled_from([{"type": "boolean"}, {"type": "null"}])
)


@pytest.fixture(scope="module")
def compiler(small_kimi: TiktokenTokenizer) -> GrammarCompiler:
    return GrammarCompiler(small_kimi)


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    @st.composite
    def build(draw: Any) -> dict[str, Any]:
        properties = draw(st.dictionaries(NAMES, inner, max_size=3))
        required = [one for one in properties if draw(st.booleans())]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return build()


def arrays(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda item, low, more: {"type": "array", "items": item, "minItems": low, "maxItems": low + more},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner), arrays(inner), st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"anyOf": parts})
    ),
    max_leaves=6,
)


def babble(kimi: TiktokenTokenizer, under: Constraint, seed: int) -> str:
    """Any allowed token, white space seldom, until the end is chosen."""
    chance, written = random.Random(seed), b""
    for _ in range(600):
        mask = under.mask()
        assert mask is not None
        allowed = [int(one) for one in np.flatnonzero(mask)]
        plain = [one for one in allowed if kimi.vocabulary.bytes_of(one).strip(b" \t\r\n")] or allowed
        if any(one in kimi.end_token_ids for one in allowed) and (len(allowed) == 1 or chance.random() < 0.5):
            return written.decode()
        token_id = chance.choice([one for one in plain if one not in kimi.end_token_ids] or allowed)
        written += kimi.vocabulary.bytes_of(token_id)
        under.accept(token_id)
    raise AssertionError(f"the output never ended: {written!r}")


@settings(max_examples=120, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**20))
def test_a_random_model_s_output_always_validates(
    small_kimi: TiktokenTokenizer, compiler: GrammarCompiler, schema: Any, seed: int
) -> None:
    program = compiler.compile(OutputRule(JsonRule(schema)))
    text = babble(small_kimi, Constraint(program, in_reasoning=False), seed)
    jsonschema.validate(json.loads(text), schema)


KEYWORDS = st.sampled_from(["type", "properties", "items", "enum", "$ref", "anyOf", "pattern", "minimum", "not", "a"])


@settings(max_examples=60, deadline=None)
@given(
    schema=st.recursive(
        st.one_of(VALUES, st.text(max_size=3)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                KEYWORDS,
                inner,
                max_size=4,
            ),
        ),
        max_leaves=12,
    ).filter(lambda one: isinstance(one, dict))
)
def test_nonsense_is_taken_or_refused_and_nothing_else(compiler: GrammarCompiler, schema: Any) -> None:
    with contextlib.suppress(BadInput):
        program = compiler.compile(OutputRule(JsonRule(schema, "s")))
        mask = Constraint(program, in_reasoning=False).mask()
        assert mask is not None
        assert mask.any()
