"""When an output ends, as far as token ids and lengths tell. Stop texts are the router's business.

Owns the rules, as values; knows no step, stream or model. An end token is reported but is no part of the output.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from meshfire.errors import InternalError


class FinishReason(enum.Enum):
    """Why an output ended by itself."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Ending:
    """How an output ended; `stop_token_id` is the end token that was chosen."""

    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(frozen=True)
class Script:
    """Test hook: the tokens to choose, from the start of the output, and what comes after them."""

    token_ids: tuple[int, ...]
    #: the end token to choose after them; None = see `ends_with_eos`
    end_token_id: int | None
    #: True = the output then ends as with an end token, else for its length
    ends_with_eos: bool

    def choice(self, index: int) -> int:
        """The token to choose at `index` of the output. Past its end only an end token is left."""
        if index < len(self.token_ids):
            return self.token_ids[index]
        if self.end_token_id is None:
            raise InternalError(f"a script of {len(self.token_ids)} tokens was asked for token {index}")
        return self.end_token_id

    def ending_before(self, index: int) -> Ending | None:
        """The end of the output if the script has nothing to choose at `index`."""
        if index < len(self.token_ids):
            return None
        if not self.ends_with_eos:
            return Ending(FinishReason.LENGTH)
        return Ending(FinishReason.STOP) if self.end_token_id is None else None


@dataclass(frozen=True)
class OutputLimits:
    """What bounds one output."""

    max_tokens: int
    #: tokens of prompt and output at most: context window and KV of this worker
    max_context_tokens: int
    #: tokens that end it from output index `min_tokens` on
    end_token_ids: frozenset[int]
    min_tokens: int = 0
    #: tokens that end it anywhere: a rule allows them only where it is complete, and then maybe nothing else
    rule_end_ids: frozenset[int] = frozenset()
    script: Script | None = None

    def ending_before(self, index: int, num_tokens: int) -> Ending | None:
        """The end of the output if no token can follow: `index` were chosen, prompt and output have `num_tokens`."""
        scripted = self.script.ending_before(index) if self.script else None
        if scripted is not None:
            return scripted
        if index >= self.max_tokens or num_tokens >= self.max_context_tokens:
            return Ending(FinishReason.LENGTH)
        return None

    def ending_with(self, index: int, token_id: int) -> Ending | None:
        """The end of the output if `token_id`, chosen at `index`, ends it."""
        after_script = self.script is not None and index >= len(self.script.token_ids)
        ends = token_id in self.rule_end_ids or (index >= self.min_tokens and token_id in self.end_token_ids)
        if after_script or ends:
            return Ending(FinishReason.STOP, token_id)
        return None
