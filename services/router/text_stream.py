"""Tokens of one output to text, over a Detokenize stream that may break and be reopened anywhere.

Detokenising is a function of the tokens so far: a reopened stream gets them all at once, and what it says of them is
cut by the characters that were already handed out. So no character is lost or doubled, whichever instance dies.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import grpc.aio

from meshfire.api.tokenizer.v1 import tokenizer_service_pb2 as pb
from meshfire.errors import MeshfireError, Unavailable
from meshfire.rpc import streams
from meshfire.rpc.status import from_rpc_error
from services.router.event_cursor import EventCursor
from services.router.tokenizers import MAY_MEND, Tokenizers, trace_metadata

_log = logging.getLogger(__name__)

_Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.DetokenizeRequest, pb.DetokenizeResponse]"

_PAUSE_S = 0.1
_FINISH_S = 1.0


@dataclass(frozen=True)
class TextPiece:
    """The answer to one batch of tokens."""

    #: text that became certain
    text: str
    #: set when a stop text ended the output before its first character
    stop_hit: str | None
    #: tokens of the batch up to the one that completed the stop text; all without one
    num_tokens_used: int
    #: bytes of each of the ids that were looked up
    pieces: tuple[bytes, ...]
    #: what became certain, of an output in a chat language
    events: tuple[pb.OutputEvent, ...] = ()
    num_reasoning_tokens: int = 0


class TextStream:
    """Feed it the output's tokens in order. Tries for ever: the caller's deadline bounds it."""

    def __init__(self, tokenizers: Tokenizers, start: pb.DetokenizeStart, traceparent: str) -> None:
        self._tokenizers = tokenizers
        self._start = start
        self._traceparent = traceparent
        self._call: _Call | None = None
        self._address = ""
        self._fed: list[int] = []
        self._num_chars_out = 0
        #: characters that a reopened stream says again
        self._num_chars_to_skip = 0
        self._cursor = EventCursor()
        self._num_reasoning_tokens = 0

    async def feed(self, token_ids: Sequence[int], *, last: bool = False, lookup_ids: Sequence[int] = ()) -> TextPiece:
        """Text of the next tokens."""
        for failures in itertools.count():
            if failures > 1:
                await asyncio.sleep(_PAUSE_S)
            try:
                async with asyncio.timeout(self._tokenizers.timeout_s):
                    return await self._exchange(token_ids, last, lookup_ids)
            except TimeoutError:
                self._break(f"no answer within {self._tokenizers.timeout_s} s")
            except grpc.aio.AioRpcError as error:
                self._break_or_raise(from_rpc_error(error))
            except MeshfireError as error:
                self._break_or_raise(error)
        raise AssertionError("unreachable")

    async def finish(self) -> None:
        """End the stream in order, so that the tokenizer's span is that of a call that went well."""
        call, self._call = self._call, None
        if call is None:
            return
        try:
            async with asyncio.timeout(_FINISH_S):
                await streams.done_writing(call)
                await call.read()
        except (TimeoutError, grpc.aio.AioRpcError) as error:
            _log.debug("detokenize stream to %s did not end in order: %s", self._address, error)
        finally:
            call.cancel()

    def close(self) -> None:
        """Drop the stream; idempotent."""
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _break_or_raise(self, error: MeshfireError) -> None:
        if not isinstance(error, MAY_MEND):
            raise error from None
        self._break(error.message)

    def _break(self, why: str) -> None:
        _log.warning("detokenize stream to %s broke (%s); reopening", self._address, why)
        self.close()

    async def _exchange(self, token_ids: Sequence[int], last: bool, lookup_ids: Sequence[int]) -> TextPiece:
        call, replayed = self._call, 0
        if call is None:
            call, replayed = await self._open(), len(self._fed)
        sent = [*self._fed, *token_ids] if replayed else token_ids
        tokens = pb.DetokenizeTokens(token_ids=sent, last=last, lookup_ids=lookup_ids)
        await streams.write(call, pb.DetokenizeRequest(tokens=tokens))
        response = await call.read()
        if not isinstance(response, pb.DetokenizeResponse):
            raise Unavailable("the tokenizer ended the stream")
        self._fed.extend(token_ids)
        return TextPiece(
            text=self._fresh(response.text),
            stop_hit=response.stop_hit if response.HasField("stop_hit") else None,
            num_tokens_used=max(0, response.num_tokens_used - replayed),
            pieces=tuple(response.pieces),
            events=self._cursor.fresh(response.events),
            num_reasoning_tokens=self._fresh_reasoning(response.num_reasoning_tokens, is_replay=replayed > 0),
        )

    async def _open(self) -> _Call:
        self._address = self._next_address()
        self._num_chars_to_skip = self._num_chars_out
        self._cursor.replay()
        # Without a request iterator: this side writes. The stubs know only the other way.
        open_call = self._tokenizers.stub(self._address).Detokenize
        call: _Call = open_call(metadata=trace_metadata(self._traceparent))  # type: ignore[call-arg]
        self._call = call
        await streams.write(call, pb.DetokenizeRequest(start=self._start))
        return call

    def _next_address(self) -> str:
        """Any instance but the one that just broke, unless it is the only one."""
        found = self._tokenizers.addresses(self._start.model)
        if not found:
            raise Unavailable("no tokenizer is in discovery")
        return min(found, key=lambda address: address == self._address)

    def _fresh_reasoning(self, count: int, *, is_replay: bool) -> int:
        fresh = count - self._num_reasoning_tokens if is_replay else count
        self._num_reasoning_tokens += fresh
        return fresh

    def _fresh(self, text: str) -> str:
        skipped = min(len(text), self._num_chars_to_skip)
        self._num_chars_to_skip -= skipped
        fresh = text[skipped:]
        self._num_chars_out += len(fresh)
        return fresh
