"""What a request wants from workers, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from meshfire.api.common.v1 import output_rule_pb2, sampling_pb2
from meshfire.api.tokenizer.v1 import tokenizer_service_pb2 as tokenizer_pb
from services.router.outlook import NO_WAIT, Outlook
from services.router.tickets import Priority


@dataclass(frozen=True)
class Script:
    """Test hook: the tokens to choose instead of the likely ones, and how it ends."""

    token_ids: tuple[int, ...]
    ends_with_eos: bool
    #: the bytes to say, if it is one text
    wants: bytes | None = None


@dataclass(frozen=True)
class Work:
    """A request that is valid, encoded and ready to be leased. `sampling` has max_tokens and seed set."""

    request_id: str
    model: str
    prompt: tuple[int, ...]
    sampling: sampling_pb2.SamplingParams
    end_ids: frozenset[int]
    #: of the event loop's clock, seconds
    deadline_s: float
    priority: Priority = Priority.ONLINE
    #: place in the queue among requests of the same priority
    arrival: int = 0
    #: whose turn it takes
    tenant: str = ""
    #: when it was let in, of the event loop's clock, and what it could expect then
    admitted_s: float = 0.0
    outlook: Outlook = NO_WAIT
    session_key: str = ""
    #: chain hashes of the prompt's full blocks: by them its prefix is found at workers
    block_hashes: tuple[bytes, ...] = ()
    cache_salt: str = ""
    #: W3C traceparent of the span that the workers' spans hang below
    traceparent: str = ""
    #: how the output is to be read; None = as text
    output: tokenizer_pb.OutputFormat | None = None
    #: what the output must look like; None = nothing is bound
    rule: output_rule_pb2.OutputRule | None = None
    #: test hook, for the first epoch only
    fault: str = ""
    script: Script | None = None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Likeliest tokens to tell at each place of the prompt; None = tell nothing of it."""
        return self.sampling.num_prompt_logprobs if self.sampling.HasField("num_prompt_logprobs") else None

    @property
    def num_scored(self) -> int:
        """Prompt tokens whose log-probability is wanted: all but the first, which follows nothing."""
        return 0 if self.num_prompt_logprobs is None else len(self.prompt) - 1
