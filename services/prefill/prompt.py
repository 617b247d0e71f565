"""What a lease asks for, as values of this service: no message type goes deeper than `wire`."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from meshfire.errors import DeadlineExceeded, InvalidPrompt, MeshfireError, PromptTooLong
from meshfire.kv.transfer import KvManifest
from meshfire.model.sampling import TokenLogprobs
from meshfire.worker.faults import Fault
from meshfire.worker.lease_key import LeaseKey


@dataclass(frozen=True)
class Prompt:
    """One prompt to compute."""

    key: LeaseKey
    token_ids: tuple[int, ...]
    cache_salt: str
    #: of the request, time.monotonic()
    deadline: float
    #: the router's span
    traceparent: str
    fault: Fault | None = None
    #: likeliest tokens to tell at each place of the prompt; None = no log-probabilities
    num_logprobs: int | None = None


@dataclass(frozen=True)
class Prefilled:
    """A computed prompt. The blocks carry one reference each, which whoever holds this value must release."""

    blocks: tuple[int, ...]
    manifest: KvManifest
    #: hidden state of the last token after the final norm: [H] float32
    last_hidden: Tensor
    num_cached_tokens: int
    #: of the tokens from the second on, if the prompt asks for them
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of all blocks."""
        return len(self.blocks) * self.manifest.geometry.block_bytes


@dataclass(frozen=True)
class PromptLimits:
    """What this worker can compute at all."""

    vocab_size: int
    context_tokens: int
    #: tokens that all KV blocks of this worker hold
    pool_tokens: int

    def check(self, token_ids: tuple[int, ...]) -> None:
        """Raise InvalidPrompt or PromptTooLong for what no time and no room would make possible here."""
        if not token_ids:
            raise InvalidPrompt("the prompt has no tokens", field="token_ids")
        lowest, highest = min(token_ids), max(token_ids)
        if lowest < 0 or highest >= self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise InvalidPrompt(
                f"token id {wrong} is not in the vocabulary of {self.vocab_size}",
                field="token_ids",
                metadata={"token_id": str(wrong), "vocab_size": str(self.vocab_size)},
            )
        self._check_length(len(token_ids))

    def _check_length(self, num_tokens: int) -> None:
        limit = min(self.context_tokens, self.pool_tokens)
        if num_tokens > limit:
            what = "context window" if limit == self.context_tokens else "KV cache of this worker"
            raise PromptTooLong(
                f"{num_tokens} tokens do not fit the {what} of {limit}",
                field="token_ids",
                metadata={"num_tokens": str(num_tokens), "max_tokens": str(limit)},
            )


class Stop:
    """Why a prompt must not go on: an error that was set from outside, or its deadline.

    `check` may be called from the model thread; `set` belongs to the event loop.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self._error: MeshfireError | None = None
        self._waiting: set[asyncio.Future[None]] = set()

    def set(self, error: MeshfireError) -> None:
        """End the prompt with `error` at its next check. The first error stands."""
        self._error = self._error or error
        for ended in self._waiting:
            if not ended.done():
                ended.set_result(None)

    def check(self) -> None:
        """Raise what ended the prompt, if anything did."""
        if self._error is not None:
            raise self._error
        if time.monotonic() >= self.deadline:
            raise DeadlineExceeded("the request's deadline passed during prefill")

    async def sleep(self, seconds: float) -> None:
        """Sleep, but not past the end of the prompt; then check."""
        await self._wait((), seconds)

    async def wait(self, wake: asyncio.Future[None]) -> None:
        """Wait for `wake`, but not past the end of the prompt; then check. Never cancels `wake`."""
        await self._wait((wake,), math.inf)

    async def _wait(self, wakes: Iterable[asyncio.Future[None]], seconds: float) -> None:
        self.check()
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(ended)
        try:
            timeout = min(seconds, max(0.0, self.deadline - time.monotonic()))
            await asyncio.wait((ended, *wakes), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiting.remove(ended)
        self.check()
