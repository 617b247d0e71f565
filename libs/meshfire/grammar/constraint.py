"""Where one output is in its rule, and which tokens may come next.

    REASONING (free) ──</think>──▶ ANSWER ──▶ end
        └──────tool section begins──────▲

Owns the phases. While the model thinks everything is allowed but what the rule forbids outright; the grammar starts
with the answer, or, where tools are only offered, with the tool section. Tokens can be taken back, for drafts that were
refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from meshfire.errors import InternalError
from meshfire.grammar.compiler import Program
from meshfire.text.kimi.markers import Marker

Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True)
class _Position:
    """What `undo` brings back: phase, open grammar, and the tokens that it has taken."""

    in_reasoning: bool
    matcher: LLMatcher | None = None
    num_taken: int = 0


class Constraint:
    """State of one output. `in_reasoning`: it starts inside <think>."""

    def __init__(self, program: Program, *, in_reasoning: bool) -> None:
        self._program = program
        self._now = _Position(in_reasoning, None if in_reasoning else _opened(program.answer))
        self._past: list[_Position] = []
        self._forbidden = self._forbidden_ids()

    def mask(self) -> Mask | None:
        """[V]: True where a token is allowed; None = all are."""
        matcher = self._now.matcher
        if matcher is not None:
            packed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            return np.unpackbits(packed, bitorder="little")[: self._program.vocab_size].astype(np.bool_)
        if not self._forbidden:
            return None
        allowed = np.ones(self._program.vocab_size, dtype=np.bool_)
        allowed[list(self._forbidden)] = False
        return allowed

    def accept(self, token_id: int) -> None:
        """A token was chosen. Raises InternalError for one that the mask forbids."""
        before = self._now
        after, consumes = (before, True) if before.matcher is not None else self._outside(token_id)
        if consumes and after.matcher is not None:
            if after.matcher.try_consume_tokens([token_id]) != 1:
                raise InternalError(f"token {token_id} breaks the output's rule")
            after = replace(after, num_taken=after.num_taken + 1)
        self._past.append(before)
        self._now = after

    def undo(self, count: int) -> None:
        """Take back the last `count` tokens."""
        for _ in range(count):
            taken, before = self._now, self._past.pop()
            if taken.matcher is not None and before.matcher is taken.matcher:
                taken.matcher.rollback(taken.num_taken - before.num_taken)
            self._now = before

    def _outside(self, token_id: int) -> tuple[_Position, bool]:
        """Where a token outside of any grammar leads, and whether it belongs to the grammar that it opens."""
        program = self._program
        marker = program.markers.by_id.get(token_id) if program.markers else None
        if marker is Marker.SECTION_BEGIN:
            return _Position(False, _opened(program.answer or program.calls)), True
        if marker is Marker.THINK_END and self._now.in_reasoning:
            return _Position(False, _opened(program.answer)), False
        return self._now, False

    def _forbidden_ids(self) -> frozenset[int]:
        """Tokens that the rule never allows outside a grammar."""
        rule, markers = self._program.rule, self._program.markers
        if markers is None:
            return frozenset()
        takes_calls = rule.calls is not None and rule.calls.mode != "none"
        closed = {Marker.CALL_BEGIN} if takes_calls else {Marker.CALL_BEGIN, Marker.SECTION_BEGIN}
        return frozenset(token_id for token_id, marker in markers.by_id.items() if marker in closed)


def _opened(grammar: LLMatcher | None) -> LLMatcher | None:
    """A grammar at its start, of this output's own."""
    return None if grammar is None else grammar.deep_copy()
