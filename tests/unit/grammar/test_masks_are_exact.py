"""A token is allowed exactly if some text of the language continues with it: tried token by token.

The oracles know no grammars: a list of all texts, or `regex`'s partial matching.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import regex

from meshfire.grammar.compiler import GrammarCompiler
from meshfire.grammar.constraint import Constraint
from meshfire.grammar.rules import ChoiceRule, ContentRule, GrammarRule, JsonRule, OutputRule, RegexRule
from tests.letters import LettersTokenizer

WORDS = [b"ab", b"aba", b"bb", b'{"', b'":', b"true", b"tr", b"12", b", ", "你".encode(), "你好".encode(), b"\xf0\x9f"]
SINGLE = [bytes([one]) for one in b'abcdxyz0123456789{}[]":,-+. truefalsnE\\/']
#: single bytes of characters that no word completes
BYTES = [b"\xe4", b"\xbd", b"\xa0", b"\xe5", b"\xa5", b"\xbd", b"\x9f", b"\xa6", b"\xab"]
TOKENIZER = LettersTokenizer(list(dict.fromkeys([*SINGLE, *WORDS, *BYTES])))
END = TOKENIZER.end_token_ids[0]

#: whether bytes can still become a text of the language, and whether they are one
Language = tuple[Callable[[bytes], bool], Callable[[bytes], bool]]


def listed(texts: Sequence[str]) -> Language:
    whole = {text.encode() for text in texts}
    starts = {text[:length] for text in whole for length in range(len(text) + 1)}
    return starts.__contains__, whole.__contains__


def expression(pattern: str) -> Language:
    """For patterns and tokens in ASCII."""

    def may_go_on(text: bytes) -> bool:
        return text.isascii() and regex.fullmatch(pattern, text.decode(), partial=True) is not None

    def is_whole(text: bytes) -> bool:
        return text.isascii() and regex.fullmatch(pattern, text.decode()) is not None

    return may_go_on, is_whole


LANGUAGES: list[tuple[ContentRule, Language]] = [
    (ChoiceRule(("ab", "aba", "b", "你好", "你 a", "🦫", "")), listed(["ab", "aba", "b", "你好", "你 a", "🦫", ""])),
    (RegexRule("[ab]{1,3}c?"), expression("[ab]{1,3}c?")),
    (RegexRule("^(ab|ba)*(x|yz)$"), expression("(ab|ba)*(x|yz)")),
    (RegexRule(r"a+(\.[0-9]{1,2})?|true"), expression(r"a+(\.[0-9]{1,2})?|true")),
    (RegexRule("你好?a"), listed(["你a", "你好a"])),
    (JsonRule({"enum": ["a", 12, True, None]}), listed(['"a"', "12", "true", "null"])),
    (JsonRule({"type": "integer", "minimum": -3, "maximum": 12}), listed(["-0", *map(str, range(-3, 13))])),
    (JsonRule({"type": "boolean"}), listed(["true", "false"])),
    (GrammarRule('start: "a" start "b" | "ab"\n'), listed(["a" * n + "b" * n for n in range(1, 30)])),
    (GrammarRule('root ::= "x" ("y" | "z"){2} "."'), listed([f"x{a}{b}." for a, b in itertools.product("yz", "yz")])),
]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER)


@pytest.mark.parametrize(("rule", "language"), LANGUAGES, ids=[str(rule)[:40] for rule, _ in LANGUAGES])
def test_a_token_is_allowed_iff_the_text_can_go_on_with_it(
    compiler: GrammarCompiler, rule: ContentRule, language: Language
) -> None:
    may_go_on, is_whole = language
    program = compiler.compile(OutputRule(rule))
    seen, open_ends = 0, [list[int]()]
    while open_ends and seen < 120:
        token_ids = open_ends.pop(0)
        under = Constraint(program, in_reasoning=False)
        for token_id in token_ids:
            under.accept(token_id)
        text = b"".join(TOKENIZER.vocabulary.bytes_of(one) for one in token_ids)
        expected = [one for one, piece in enumerate(TOKENIZER.pieces) if may_go_on(text + piece)]
        mask = under.mask()
        assert mask is not None
        allowed = np.flatnonzero(mask).tolist()
        assert allowed == expected + ([END] if is_whole(text) else []), text
        open_ends += [[*token_ids, one] for one in expected]
        seen += 1


def test_an_object_s_texts_are_exactly_those_of_its_schema(compiler: GrammarCompiler) -> None:
    """Without white space, which the rule allows between tokens."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    texts = [json.dumps({"a": one}, separators=(",", ":")) for one in (1, 2)]
    texts += [json.dumps({"a": a, "b": b}, separators=(",", ":")) for a in (1, 2) for b in (True, False)]
    may_go_on, is_whole = listed(texts)
    program = compiler.compile(OutputRule(JsonRule(schema)))
    open_ends = [list[int]()]
    while open_ends:
        token_ids = open_ends.pop()
        under = Constraint(program, in_reasoning=False)
        for token_id in token_ids:
            under.accept(token_id)
        text = b"".join(TOKENIZER.vocabulary.bytes_of(one) for one in token_ids)
        mask = under.mask()
        assert mask is not None
        dense = [one for one, piece in enumerate(TOKENIZER.pieces) if mask[one] and b" " not in piece]
        assert dense == [one for one, piece in enumerate(TOKENIZER.pieces) if may_go_on(text + piece)], text
        assert bool(mask[END]) == is_whole(text), text
        open_ends += [[*token_ids, one] for one in dense]


def test_masks_along_a_draft_are_those_of_going_there(compiler: GrammarCompiler) -> None:
    program = compiler.compile(OutputRule(RegexRule("(ab|ba)*x")))
    encode = TOKENIZER.encode_plain
    for draft, num_masks in ((encode("abba"), None), (encode("abbx"), None), ([*encode("abx"), END], None), ([], 1)):
        under, stepwise = Constraint(program, in_reasoning=False), Constraint(program, in_reasoning=False)
        before = under.mask()
        expected = [stepwise.mask()]
        for token_id in draft:
            last = expected[-1]
            if last is None or not last[token_id] or token_id == END:
                break
            stepwise.accept(token_id)
            expected.append(stepwise.mask())
        masks = under.masks_along(draft)
        assert num_masks is None or len(masks) == num_masks
        assert np.array_equal(np.array(masks), np.array(expected))
        after = under.mask()
        assert before is not None
        assert after is not None
        assert before.tolist() == after.tolist(), "nothing has changed"
        assert under.num_tokens == 0


def test_a_model_may_have_more_rows_than_its_vocabulary() -> None:
    for size in (TOKENIZER.vocabulary.size + 5, TOKENIZER.vocabulary.size):
        wide = GrammarCompiler(TOKENIZER, size)
        mask = Constraint(wide.compile(OutputRule(ChoiceRule(("ab",)))), in_reasoning=False).mask()
        assert mask is not None
        assert mask.shape == (size,)
        assert not mask[TOKENIZER.vocabulary.size :].any()
