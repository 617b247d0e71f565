"""What a step's result means for one lease: its tokens, its end, what its router is told.

Owns the order of these; changes the lease and its sequence, sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.decode.ending import Ending
from services.decode.planning import PartResult
from services.decode.reports import NewTokens


@dataclass(frozen=True)
class Taken:
    """What one lease got, and the end of its output if it has come."""

    result: PartResult
    new: NewTokens | None
    ending: Ending | None
    #: tokens of the sequence whose KV is computed now
    num_computed_tokens: int


def take(result: PartResult) -> Taken:
    """Append the tokens, up to the end of the output; an end token is not part of it."""
    lease, part = result.lease, result.part
    sequence, limits = lease.sequence, lease.order.limits
    if result.scores:
        _note_scored(result)
    if part.draft_ids and lease.drafts is not None:
        lease.drafts.verified(len(part.draft_ids), result.num_accepted)
    if not result.sampled:
        done = part.is_last and lease.order.prompt_only
        ending = limits.ending_before(0, sequence.num_tokens) if done else None
        return Taken(result, None, ending, part.stop)
    first, ending = sequence.num_output_tokens, None
    for one in result.sampled:
        ending = limits.ending_with(sequence.num_output_tokens, one.token_id)
        if ending is not None:
            break
        sequence.append(one.token_id)
        ending = lease.ending_before_next()
        if ending is not None:
            break
    num_taken = sequence.num_output_tokens - first
    new = NewTokens(lease.order, first, result.sampled[:num_taken]) if num_taken else None
    return Taken(result, new, ending, part.stop + min(num_taken, result.num_accepted))


def _note_scored(result: PartResult) -> None:
    """What was scored once need not be computed again for its hidden states."""
    order, num_scored = result.lease.order, result.part.start + len(result.scores)
    result.lease.sequence.wanted_from = num_scored if num_scored < order.num_scored else None
