"""Compiles rules for one vocabulary, with limits against hostile ones, and keeps what was compiled.

Owns the engine (llguidance) and its limits. Compiling takes milliseconds to a second: callers run it on a thread.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from meshfire.errors import BadInput
from meshfire.grammar.complaint import locate
from meshfire.grammar.lark import answer_grammar, json_terminal
from meshfire.grammar.rules import GrammarRule, JsonRule, OutputRule
from meshfire.grammar.schema_limits import check_size
from meshfire.text.kimi.markers import Markers
from meshfire.text.tokenizer import Tokenizer
from meshfire.text.vocabulary import Vocabulary

#: A grammar's text; larger ones are refused before they are parsed.
MAX_GRAMMAR_BYTES = 256 * 1024
_KEPT = 256
_PART = 300  # characters of an engine's message that are passed on
#: Masks are exact: where only one text can follow, each of its tokenisations may, not the tokenizer's own alone.
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
#: Of a parser's step, for grammars that people write: ambiguous ones take cubic time, which schemas never do.
_GRAMMAR_ITEMS = 3_000
#: Looking for the part of a schema that is refused ends after this, with what was found until then.
_SEARCH_S = 1.0


def _limits(max_items: int = 50_000) -> LLParserLimits:
    """Those of a step bound what a hostile rule takes of a step that others share: tens of milliseconds at worst."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=max_items,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


@dataclass(frozen=True)
class Program:
    """A compiled rule. `answer` is the start of the answer's grammar, `calls` that of a tool section alone."""

    rule: OutputRule
    markers: Markers | None
    vocab_size: int
    end_token_ids: tuple[int, ...]
    answer: LLMatcher | None
    calls: LLMatcher | None


class GrammarCompiler:
    """For the vocabulary of one model. Safe to use from several threads. `vocab_size`: width of masks, if another."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = tokenizer.vocabulary.size if vocab_size is None else vocab_size
        self._markers = Markers.find(tokenizer.specials)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def vocabulary(self) -> Vocabulary:
        """Ids and bytes."""
        return self._tokenizer.vocabulary

    @property
    def speaks_kimi(self) -> bool:
        """Whether the vocabulary has the markers of tool calls."""
        return self._markers is not None

    def warm_up(self) -> None:
        """Prepare the vocabulary: up to a second for 163,840 tokens, in which no other thread runs."""
        if self._tokenizer.end_token_ids:
            self._matcher(OutputRule(JsonRule(True)), 'start: "a"\n')

    def compile(self, rule: OutputRule) -> Program:
        """Raises BadInput naming the field: a rule that is wrong, too large, or cannot be enforced."""
        content, calls = rule.content, rule.calls
        if not self._tokenizer.end_token_ids:
            raise BadInput("this model has no end token, so no rule can end an output", field=_field_of(rule))
        for field, schema in _schemas(rule):
            check_size(schema, field)
        if calls is not None and calls.mode == "required":
            content = None
        answer = section = None
        if content is not None or (calls is not None and calls.mode == "required"):
            answer = self._matcher(rule, answer_grammar(content, calls, self._markers))
        elif calls is not None and calls.mode == "auto":
            section = self._matcher(rule, answer_grammar(None, calls, self._markers))
        ends = self._tokenizer.end_token_ids
        return Program(rule, self._markers, self._vocab_size, ends, answer, section)

    def _matcher(self, rule: OutputRule, grammar: str) -> LLMatcher:
        if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
            raise BadInput(f"the rule is larger than {MAX_GRAMMAR_BYTES} bytes", field=_field_of(rule))
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known
        source = LLMatcher.grammar_from_lark(_NO_FORCING + grammar)
        limits = _limits(_GRAMMAR_ITEMS) if isinstance(rule.content, GrammarRule) else _limits()
        matcher = LLMatcher(self._engine, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise self._complaint(rule, matcher.get_error())
        first = matcher.deep_copy()
        first.compute_bitmask()  # also prepares what all copies share
        if first.is_error():
            why = _first_line(first.get_error())[:_PART]
            raise BadInput(f"{_field_of(rule)}: no text fits it, or it is too complex: {why}", field=_field_of(rule))
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return matcher

    def _complaint(self, rule: OutputRule, message: str) -> BadInput:
        """Name the smallest part that is refused."""
        until = time.monotonic() + _SEARCH_S

        def refuses(schema: Mapping[str, Any]) -> str:
            return self._refuses(schema) if time.monotonic() < until else ""

        for field, schema in _schemas(rule):
            why = self._refuses(schema)
            if why:
                path = locate(schema, refuses)
                where = f"{field}.{path}" if path else field
                return BadInput(f"{path or 'the schema'} cannot be enforced: {why[:_PART]}", field=where)
        return BadInput(f"the rule cannot be enforced: {_first_line(message)[:_PART]}", field=_field_of(rule))

    def refuses(self, schema: Mapping[str, Any]) -> str:
        """Why a schema cannot be enforced; "" if it can."""
        try:
            check_size(schema, "schema")
        except BadInput as error:
            return error.message
        return self._refuses(schema)

    def _refuses(self, schema: Mapping[str, Any]) -> str:
        grammar = LLMatcher.grammar_from_lark(f"start: {json_terminal(schema)}\n")
        return _first_line(LLMatcher.validate_grammar(grammar, self._engine, limits=_limits()))

    @cached_property
    def _engine(self) -> LLTokenizer:
        tokenizer = self._tokenizer
        return LLTokenizer(
            TokenizerWrapper(_Adapter(tokenizer)),
            n_vocab=tokenizer.vocabulary.size,
            eos_token=list(tokenizer.end_token_ids),
        )


class _Adapter:
    """A vocabulary as llguidance wants it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = tokenizer.end_token_ids[0]
        self.tokens = list(tokenizer.vocabulary.pieces)
        self.special_token_ids = sorted(tokenizer.specials.ids)
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode_plain(plain, at_start=False)


def _schemas(rule: OutputRule) -> list[tuple[str, Mapping[str, Any]]]:
    found: list[tuple[str, Mapping[str, Any]]] = []
    if isinstance(rule.content, JsonRule) and isinstance(rule.content.schema, Mapping):
        found.append((rule.content.field, rule.content.schema))
    functions = rule.calls.functions if rule.calls is not None else ()
    found += [(one.field, one.parameters) for one in functions if isinstance(one.parameters, Mapping)]
    return found


def _field_of(rule: OutputRule) -> str:
    return rule.content.field if rule.content is not None else "rule.calls"


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0] if message.strip() else ""
