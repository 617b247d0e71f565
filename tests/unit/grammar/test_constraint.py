"""Structured output: what the masks allow, judged by json, plain comparisons and re, never by the engine itself."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from meshfire.errors import BadInput, InternalError
from meshfire.grammar.compiler import GrammarCompiler
from meshfire.grammar.constraint import Constraint
from meshfire.grammar.rules import CallsRule, ChoiceRule, FunctionRule, GrammarRule, JsonRule, OutputRule, RegexRule
from meshfire.text.kimi.events import CallArguments, CallBegin
from meshfire.text.kimi.headers import Functions
from meshfire.text.kimi.markers import Marker, Markers
from meshfire.text.kimi.output import OutputParser, State
from meshfire.text.tiktoken_tokenizer import TiktokenTokenizer
from tests.letters import LettersTokenizer

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = FunctionRule(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
STOP = FunctionRule("stop", {"type": "object", "properties": {}, "additionalProperties": False})


@pytest.fixture(scope="module")
def compiler(small_kimi: TiktokenTokenizer) -> GrammarCompiler:
    return GrammarCompiler(small_kimi)


def constraint(compiler: GrammarCompiler, rule: OutputRule, *, in_reasoning: bool = False) -> Constraint:
    return Constraint(compiler.compile(rule), in_reasoning=in_reasoning)


def babble(kimi: TiktokenTokenizer, under: Constraint, seed: int, limit: int = 400) -> list[int]:
    """A model that knows nothing: any allowed token, until only the end is left."""
    chance, written = random.Random(seed), []
    while len(written) < limit:
        mask = under.mask()
        allowed = np.arange(kimi.vocabulary.size) if mask is None else np.flatnonzero(mask)
        ends = [int(one) for one in allowed if one in kimi.end_token_ids]
        others = [int(one) for one in allowed if one not in kimi.end_token_ids and kimi.vocabulary.bytes_of(int(one))]
        if ends and (not others or chance.random() < 0.3):
            return written
        assert others, "a rule must always leave something to say"
        # printable characters first, or strings of control escapes would never end
        plain = [one for one in others if kimi.vocabulary.bytes_of(one).strip(b" \t\r\n")] or others
        written.append(chance.choice(plain))
        under.accept(written[-1])
    pytest.fail("the output never ended")


def text_of(kimi: TiktokenTokenizer, token_ids: list[int]) -> str:
    return b"".join(kimi.vocabulary.bytes_of(one) for one in token_ids).decode()


@pytest.mark.parametrize("seed", range(12))
def test_a_babbling_model_writes_json_that_fits(
    small_kimi: TiktokenTokenizer, compiler: GrammarCompiler, seed: int
) -> None:
    written = babble(small_kimi, constraint(compiler, OutputRule(JsonRule(PERSON))), seed)
    value = json.loads(text_of(small_kimi, written))
    assert {"name", "age"} <= value.keys() <= {"name", "age", "tags"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 4
    assert 0 <= value["age"] <= 120
    assert all(one in "ab" for one in value.get("tags", []))


def test_regex_choice_and_grammars(small_kimi: TiktokenTokenizer, compiler: GrammarCompiler) -> None:
    for seed in range(6):
        regex = text_of(
            small_kimi, babble(small_kimi, constraint(compiler, OutputRule(RegexRule(r"[a-c]{2}/\d{1,3}"))), seed)
        )
        assert re.fullmatch(r"[a-c]{2}/\d{1,3}", regex)
        options = ("yes", 'no "never"', "你好")
        assert (
            text_of(small_kimi, babble(small_kimi, constraint(compiler, OutputRule(ChoiceRule(options))), seed))
            in options
        )
        lark = GrammarRule('start: "a" b "c"\nb: "x" | "y" b\n')
        assert re.fullmatch(
            "ay*xc", text_of(small_kimi, babble(small_kimi, constraint(compiler, OutputRule(lark)), seed))
        )
        gbnf = GrammarRule('root ::= "q" [0-9] "!"')
        assert re.fullmatch(
            r"q\d!", text_of(small_kimi, babble(small_kimi, constraint(compiler, OutputRule(gbnf)), seed))
        )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_are_calls_of_declared_functions(
    small_kimi: TiktokenTokenizer, compiler: GrammarCompiler, seed: int, parallel: bool
) -> None:
    rule = OutputRule(calls=CallsRule("required", (WEATHER, STOP), parallel))
    written = babble(small_kimi, constraint(compiler, rule), seed)
    markers = Markers.find(small_kimi.specials)
    assert markers is not None
    parser = OutputParser(small_kimi.vocabulary, markers, start=State.CONTENT, functions=Functions())
    events = [*parser.add(written), *parser.finish()]
    names = [one.name for one in events if isinstance(one, CallBegin)]
    assert names
    assert parallel or len(names) == 1
    for index, name in enumerate(names):
        arguments = json.loads(
            "".join(one.text for one in events if isinstance(one, CallArguments) and one.index == index)
        )
        assert arguments.keys() == ({"city"} if name == "get_weather" else set())


def test_reasoning_is_free_and_the_answer_is_not(small_kimi: TiktokenTokenizer, compiler: GrammarCompiler) -> None:
    under = constraint(compiler, OutputRule(JsonRule({"type": "object"})), in_reasoning=True)
    for token_id in small_kimi.encode_plain("so {"):
        mask = under.mask()
        assert mask is not None
        assert mask[token_id]
        under.accept(token_id)
    think_end = small_kimi.specials.by_content[Marker.THINK_END.value].token_id
    section = small_kimi.specials.by_content[Marker.SECTION_BEGIN.value].token_id
    mask = under.mask()
    assert mask is not None
    assert mask[think_end]
    assert not mask[section], "no tools were given"
    under.accept(think_end)
    after = under.mask()
    assert after is not None
    assert [chr(one) for one in np.flatnonzero(after) if chr(one) not in " \t\r\n" and one < 256] == ["{"]


def test_offered_tools_leave_content_free_and_bind_the_section(
    small_kimi: TiktokenTokenizer, compiler: GrammarCompiler
) -> None:
    under = constraint(compiler, OutputRule(calls=CallsRule("auto", (WEATHER,))), in_reasoning=True)
    ids = {marker: small_kimi.specials.by_content[marker.value].token_id for marker in Marker}
    under.accept(ids[Marker.THINK_END])
    for token_id in small_kimi.encode_plain("Hm. "):
        under.accept(token_id)
    under.accept(ids[Marker.SECTION_BEGIN])
    mask = under.mask()
    assert mask is not None
    assert np.flatnonzero(mask).tolist() == [ids[Marker.CALL_BEGIN]]
    with pytest.raises(InternalError):
        under.accept(65)
    for token_id in [ids[Marker.CALL_BEGIN], *small_kimi.encode_plain("functions.get_weather:3")]:
        under.accept(token_id)
    mask = under.mask()
    assert mask is not None
    assert mask[ids[Marker.ARGUMENTS_BEGIN]]
    # the tool section may open inside the reasoning, too
    early = constraint(compiler, OutputRule(calls=CallsRule("auto", (WEATHER,))), in_reasoning=True)
    early.accept(ids[Marker.SECTION_BEGIN])
    mask = early.mask()
    assert mask is not None
    assert np.flatnonzero(mask).tolist() == [ids[Marker.CALL_BEGIN]]


def test_no_calls_means_none(small_kimi: TiktokenTokenizer, compiler: GrammarCompiler) -> None:
    under = constraint(compiler, OutputRule(calls=CallsRule("none")))
    mask = under.mask()
    assert mask is not None
    for marker in (Marker.SECTION_BEGIN, Marker.CALL_BEGIN):
        assert not mask[small_kimi.specials.by_content[marker.value].token_id]
    assert mask.sum() == small_kimi.vocabulary.size - 2


def test_tokens_can_be_taken_back(small_kimi: TiktokenTokenizer, compiler: GrammarCompiler) -> None:
    think_end = small_kimi.specials.by_content[Marker.THINK_END.value].token_id
    tokens = [*b"hm", think_end, *b'{"name": "A", "age": 7']
    under = constraint(compiler, OutputRule(JsonRule(PERSON)), in_reasoning=True)
    masks = []
    for token_id in tokens:
        masks.append(under.mask())
        under.accept(token_id)
    for back in range(1, len(tokens) + 1):
        under.undo(1)
        seen, expected = under.mask(), masks[-back]
        assert (seen is None) == (expected is None)
        assert seen is None or np.array_equal(seen, expected)
    for token_id in tokens:  # and forward again, in one go back
        under.accept(token_id)
    under.undo(len(tokens))
    again = under.mask()
    assert np.array_equal(again, masks[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        (
            OutputRule(JsonRule({"properties": {"code": {"type": "string", "pattern": "["}}}, "s")),
            "s.properties.code.pattern",
        ),
        (
            OutputRule(JsonRule({"properties": {"c": {"type": "string", "pattern": r"(a)\1"}}}, "s")),
            "s.properties.c.pattern",
        ),
        (
            OutputRule(JsonRule({"type": "array", "items": {"type": "integer", "not": {"const": 3}}}, "s")),
            "s.items.not",
        ),
        (OutputRule(JsonRule({"type": "array", "uniqueItems": True}, "s")), "s.uniqueItems"),
        (OutputRule(JsonRule({"$ref": "http://elsewhere/x"}, "s")), "s.$ref"),
        (OutputRule(RegexRule("(")), "rule.content.regex"),
        (OutputRule(ChoiceRule(())), "rule.content.choices"),
        (OutputRule(GrammarRule("start: nowhere")), "rule.content.grammar"),
        (OutputRule(GrammarRule("root ::= (")), "rule.content.grammar"),
        (OutputRule(calls=CallsRule("required")), "rule.calls"),
        (OutputRule(GrammarRule('start: "a"'), CallsRule("auto", (STOP,))), "rule.content.grammar"),
        (
            OutputRule(
                calls=CallsRule("auto", (FunctionRule("f", {"properties": {"p": {"pattern": "("}}}, "tools[0]"),))
            ),
            "tools[0].properties.p.pattern",
        ),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(compiler: GrammarCompiler, rule: OutputRule, field: str) -> None:
    with pytest.raises(BadInput) as caught:
        compiler.compile(rule)
    assert caught.value.field == field
    assert len(caught.value.message) < 600


def test_hostile_rules_are_bounded(compiler: GrammarCompiler) -> None:
    with pytest.raises(BadInput):
        compiler.compile(OutputRule(JsonRule({"enum": ["x" * 100] * 5000})))
    with pytest.raises(BadInput):
        compiler.compile(OutputRule(RegexRule("(" * 500 + "a" + "){1,50}" * 500)))


def test_an_ambiguous_grammar_is_given_up_before_it_takes_long() -> None:
    """On a vocabulary with long words of its letter, as real ones have."""
    repeated = LettersTokenizer([b"a" * length for length in range(1, 12)])
    grammar = GrammarRule('start: e\ne: e e e | "a" | "a" e | e "a" |\n')
    with pytest.raises(BadInput, match="Too many items"):
        under = constraint(GrammarCompiler(repeated), OutputRule(grammar))
        for _ in range(300):
            under.mask()
            under.accept(0)


def test_a_large_schema_is_followed_to_its_end(small_kimi: TiktokenTokenizer, compiler: GrammarCompiler) -> None:
    branches = [{"type": "object", "properties": {f"p{i}": {"pattern": f"^.*{i}.*$"}}} for i in range(100)]
    under = constraint(compiler, OutputRule(JsonRule({"anyOf": branches})))
    for token_id in b'{"p1": "hello 1 world", "x": [1,2,{"y": "z"}]}':
        mask = under.mask()
        assert mask is not None
        assert mask[token_id]
        under.accept(token_id)


def test_compiled_rules_are_shared_and_outputs_are_not(
    small_kimi: TiktokenTokenizer, compiler: GrammarCompiler
) -> None:
    rule = OutputRule(ChoiceRule(("abc", "abd")))
    first, second = constraint(compiler, rule), constraint(compiler, rule)
    for token_id in b"ab":
        first.accept(token_id)
    mask = second.mask()
    assert mask is not None
    assert bytes(np.flatnonzero(mask[:256]).tolist()) == b"a"
