"""What a step's result means for one lease: its tokens, its end, what its router is told.

Owns the order of these; changes the lease and its sequence, sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.decode.ending import Ending
from services.decode.planning import PartResult
from services.decode.reports import NewToken


@dataclass(frozen=True)
class Taken:
    """New tokens of one lease, and the end of its output if it has come."""

    result: PartResult
    token: NewToken | None
    ending: Ending | None


def take(result: PartResult) -> Taken:
    """Append the token, unless it is an end token."""
    lease = result.lease
    sequence, limits = lease.sequence, lease.order.limits
    if result.scores:
        _note_scored(result)
    if result.sampled is None:
        done = result.part.is_last and lease.order.prompt_only
        return Taken(result, None, limits.ending_before(0, sequence.num_tokens) if done else None)
    index = sequence.num_output_tokens
    ending = limits.ending_with(index, result.sampled.token_id)
    if ending is not None:
        return Taken(result, None, ending)
    sequence.append(result.sampled.token_id)
    token = NewToken(lease.order, index, result.sampled)
    return Taken(result, token, lease.ending_before_next())


def _note_scored(result: PartResult) -> None:
    """What was scored once need not be computed again for its hidden states."""
    order, num_scored = result.lease.order, result.part.start + len(result.scores)
    result.lease.sequence.wanted_from = num_scored if num_scored < order.num_scored else None
