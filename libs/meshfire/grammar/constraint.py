"""Where one output is in its rule, and which tokens may come next.

    REASONING (free) ──</think>──▶ ANSWER ──▶ end
        └──────tool section begins──────▲

Owns the phases. While the model thinks everything is allowed but what the rule forbids outright; the grammar starts
with the answer, or, where tools are only offered, with the tool section. Tokens can be taken back, for drafts that were
refused. Not thread-safe: one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from meshfire.errors import BadInput, InternalError
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
        self._outside_mask = self._allowed_outside()

    @property
    def num_tokens(self) -> int:
        """Tokens that it has taken."""
        return len(self._past)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids that end an output, where its rule is complete."""
        return self._program.end_token_ids

    def mask(self) -> Mask | None:
        """[V]: True where a token is allowed; None = all are. Not to be changed.

        Raises BadInput if the rule cannot be followed any further.
        """
        matcher = self._now.matcher
        if matcher is None:
            return self._outside_mask
        packed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error() or not packed.any():
            raise BadInput(f"the rule cannot be followed any further: {matcher.get_error() or 'nothing fits'}"[:300])
        return _of_width(np.unpackbits(packed, bitorder="little").view(np.bool_), self._program.vocab_size)

    def accept(self, token_id: int) -> None:
        """A token was chosen. Raises InternalError for one that the mask forbids; nothing has changed then."""
        before = self._now
        after, consumes = (before, True) if before.matcher is not None else self._outside(token_id)
        if consumes and after.matcher is not None:
            if after.matcher.validate_tokens([token_id]) != 1 or not after.matcher.consume_token(token_id):
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

    def masks_along(self, draft_ids: Sequence[int]) -> list[Mask | None]:
        """Masks before each draft token and after the last, up to the first draft that is forbidden or ends the output.

        k + 1 masks mean that the first k drafts may be taken, if the model agrees. Changes nothing.
        """
        masks: list[Mask | None] = [self.mask()]
        taken = 0
        try:
            for token_id in draft_ids:
                mask = masks[-1]
                if token_id in self._program.end_token_ids or (mask is not None and not mask[token_id]):
                    break
                self.accept(token_id)
                taken += 1
                masks.append(self.mask())
        finally:
            self.undo(taken)
        return masks

    def _outside(self, token_id: int) -> tuple[_Position, bool]:
        """Where a token outside of any grammar leads, and whether it belongs to the grammar that it opens."""
        program = self._program
        marker = program.markers.by_id.get(token_id) if program.markers else None
        if marker is Marker.SECTION_BEGIN:
            return _Position(False, _opened(program.answer or program.calls)), True
        if marker is Marker.THINK_END and self._now.in_reasoning:
            return _Position(False, _opened(program.answer)), False
        return self._now, False

    def _allowed_outside(self) -> Mask | None:
        """All but what the rule never allows outside a grammar; an answer that is owed forbids the end, too."""
        program = self._program
        if program.markers is None:
            return None
        calls = program.rule.calls
        closed = {Marker.CALL_BEGIN}
        if calls is None or calls.mode == "none":
            closed.add(Marker.SECTION_BEGIN)
        forbidden = [token_id for token_id, marker in program.markers.by_id.items() if marker in closed]
        if program.answer is not None:
            forbidden += program.end_token_ids
        allowed = np.ones(program.vocab_size, dtype=np.bool_)
        allowed[forbidden] = False
        return allowed


def _of_width(mask: Mask, size: int) -> Mask:
    """A model may have more rows than its vocabulary has tokens."""
    return mask[:size] if len(mask) >= size else np.pad(mask, (0, size - len(mask)))


def _opened(grammar: LLMatcher | None) -> LLMatcher | None:
    """A grammar at its start, of this output's own."""
    return None if grammar is None else grammar.deep_copy()
