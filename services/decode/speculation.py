"""Drafts for the parts of a step.

Owns when a lease is drafted for, and how far there is room. Exactness is elsewhere, and simple: the token of each
position is chosen from its own logits with its own noise, as one at a time; a draft is right exactly if it is the token
that was chosen (`planning.accepted`). Rows of wrong drafts are overwritten by the steps after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshfire.sched.policy import Scheduler
from services.decode.drafting import DRAFTERS, Drafter, DraftPace
from services.decode.lease import DecodeLease
from services.decode.planning import LeasePart


@dataclass(frozen=True)
class Speculation:
    """`make_drafter` None: no drafts."""

    make_drafter: Callable[[], Drafter] | None = None
    max_tokens: int = 0

    @classmethod
    def named(cls, name: str, max_tokens: int) -> Speculation:
        """As the setting says; `off`, or a name of DRAFTERS."""
        return cls() if name == "off" else cls(DRAFTERS[name], max_tokens)

    def with_drafts(self, parts: Sequence[LeasePart], scheduler: Scheduler) -> list[LeasePart]:
        """The parts of a step, some of them with drafts, for which there are blocks."""
        if self.make_drafter is None:
            return list(parts)
        return [self._drafted(one, scheduler, self.make_drafter) for one in parts]

    def _drafted(self, one: LeasePart, scheduler: Scheduler, make_drafter: Callable[[], Drafter]) -> LeasePart:
        lease, sequence = one.lease, one.lease.sequence
        if not may_draft(one):
            return one
        if lease.drafts is None:
            lease.drafts = DraftPace(make_drafter(), self.max_tokens)
        draft_ids = lease.drafts.draft(sequence.token_ids, _room(lease))
        draft_ids = draft_ids[: scheduler.reserve(sequence, len(draft_ids))]
        return replace(one, part=replace(one.part, draft_ids=draft_ids)) if draft_ids else one


def may_draft(one: LeasePart) -> bool:
    """Whether the part is one token in the middle of an output that nobody but the model chooses.

    Test hooks count steps or replace choices; the masks of a rule are made for one position.
    """
    order = one.lease.order
    in_output = one.part.stop - one.part.start == 1 and one.chooses
    return in_output and order.limits.script is None and order.fault is None and order.rule is None


def _room(lease: DecodeLease) -> int:
    """Drafts after which another token may still be chosen."""
    sequence, limits = lease.sequence, lease.order.limits
    by_output = limits.max_tokens - sequence.num_output_tokens
    return min(by_output, limits.max_context_tokens - sequence.num_tokens) - 1
