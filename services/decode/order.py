"""What a lease asks for, as a value of this service: no message type goes deeper than `wire`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshfire.grammar.rules import OutputRule
from meshfire.model.sampling import SamplingParams
from meshfire.worker.faults import Fault
from meshfire.worker.lease_key import LeaseKey
from services.decode.ending import OutputLimits
from services.decode.kv_reader import KvSource
from services.decode.wanted import WantedText


@dataclass(frozen=True)
class Order:
    """Continue these tokens."""

    key: LeaseKey
    #: prompt and the output so far
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    cache_salt: str
    #: where their KV waits; None = this worker computes it
    source: KvSource | None
    #: of the request, time.monotonic()
    deadline: float
    #: the router's span
    traceparent: str
    params: SamplingParams
    limits: OutputLimits
    fault: Fault | None = None
    #: likeliest tokens to tell at each place of the prompt, which is computed here; None = no log-probabilities
    num_prompt_logprobs: int | None = None
    #: what the output must look like; None = nothing is bound
    rule: OutputRule | None = None
    #: the output begins inside the reasoning, which stays free
    in_reasoning: bool = False
    #: test hook: what it would say if the rule let it
    wanted: WantedText | None = None

    @cached_property
    def prompt_ids(self) -> tuple[int, ...]:
        """Without the output so far. Cached: every step asks for it."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def num_scored(self) -> int:
        """Prompt tokens whose log-probability is to be told: all but the first, which follows nothing."""
        return 0 if self.num_prompt_logprobs is None else self.num_prompt_tokens - 1

    @property
    def prompt_only(self) -> bool:
        """Computing the prompt is all."""
        return self.limits.max_tokens == 0
