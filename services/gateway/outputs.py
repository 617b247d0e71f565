"""One output as it grows out of `GenerateResponse` messages. Knows no dialect and no call.

Token ids are complete here: the end token, which has no text and comes with the last message, is appended as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshfire.api.common.v1 import sampling_pb2
from meshfire.api.router.v1 import inference_service_pb2 as pb
from meshfire.api.tokenizer.v1 import tokenizer_service_pb2 as tokenizer_pb
from meshfire.metering.neurons import neurons


@dataclass(frozen=True)
class CallPiece:
    """A part of a tool call: its beginning (with id and name), or more of its arguments."""

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class ToolCall:
    """A tool call as it grows."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass(frozen=True)
class Piece:
    """What one message added to an output."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[sampling_pb2.TokenLogprobs, ...] = ()
    #: text that the model thought
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    #: bytes of the prompt's first token, which comes before `logprobs` and has none
    first_piece: bytes | None = None
    #: the output's first message: admitted, nothing generated
    started: bool = False
    #: its last message
    finished: bool = False

    @property
    def has_logprobs(self) -> bool:
        """Whether there is a token to list."""
        return bool(self.logprobs) or self.first_piece is not None


@dataclass
class Output:
    """State of one output. `index` is its place in the answer."""

    index: int
    prompt_index: int
    started: pb.GenerateStarted | None = None
    finished: pb.GenerateFinished | None = None
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[sampling_pb2.TokenLogprobs] = field(default_factory=list)
    #: the prompt, if it is part of the answer
    prompt_text: str = ""
    first_piece: bytes | None = None
    prompt_logprobs: list[sampling_pb2.TokenLogprobs] = field(default_factory=list)

    def add(self, response: pb.GenerateResponse) -> Piece:
        """Take one message in; what it added."""
        kind = response.WhichOneof("event")
        if kind == "delta":
            return self._grow(response.delta)
        if kind == "finished":
            return self._finish(response.finished)
        if kind == "prompt":
            return self._echo(response.prompt)
        self.started = response.started
        return Piece(started=True)

    @property
    def usage(self) -> pb.Usage:
        """Tokens so far; the router's own count once the output ended."""
        if self.finished is not None:
            return self.finished.usage
        prompt = 0 if self.started is None else self.started.num_prompt_tokens
        return pb.Usage(num_prompt_tokens=prompt, num_output_tokens=len(self.token_ids))

    def _echo(self, part: pb.GeneratePrompt) -> Piece:
        holds_first = len(part.logprobs) < len(part.token_ids)
        piece = Piece(part.text, logprobs=tuple(part.logprobs), first_piece=part.first_piece if holds_first else None)
        self.prompt_text += piece.text
        self.prompt_logprobs.extend(piece.logprobs)
        self.first_piece = self.first_piece if piece.first_piece is None else piece.first_piece
        return piece

    def _grow(self, delta: pb.GenerateDelta) -> Piece:
        calls = tuple(part for event in delta.events if (part := _call_piece(event)) is not None)
        thought = "".join(event.reasoning for event in delta.events)
        piece = Piece(delta.text, tuple(delta.token_ids), tuple(delta.logprobs), thought, calls)
        self.text.append(piece.text)
        self.reasoning.append(piece.reasoning)
        for part in calls:
            if part.call_id:
                self.calls.append(ToolCall(part.call_id, part.name))
            self.calls[part.index].arguments += part.arguments
        self.token_ids.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs)
        return piece

    def _finish(self, finished: pb.GenerateFinished) -> Piece:
        self.finished = finished
        missing = finished.usage.num_output_tokens - len(self.token_ids)
        end = (finished.stop_token_id,) if finished.HasField("stop_token_id") and missing == 1 else ()
        self.token_ids.extend(end)
        return Piece(token_ids=end, finished=True)


@dataclass(frozen=True)
class UsageTotal:
    """Tokens of a whole answer: each prompt once, each output in full."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_reasoning_tokens: int
    neurons: float


def total(outputs: Sequence[Output]) -> UsageTotal:
    """Sum over the outputs. A prompt that several outputs share counts once, and of it as cached only what none of them
    had to compute: what one computes and the others then find was not there before this request."""
    prompts: dict[int, list[pb.Usage]] = {}
    for one in outputs:
        prompts.setdefault(one.prompt_index, []).append(one.usage)
    return UsageTotal(
        num_prompt_tokens=sum(max(one.num_prompt_tokens for one in usages) for usages in prompts.values()),
        num_cached_tokens=sum(min(one.num_cached_tokens for one in usages) for usages in prompts.values()),
        num_output_tokens=sum(one.usage.num_output_tokens for one in outputs),
        num_reasoning_tokens=sum(one.usage.num_reasoning_tokens for one in outputs),
        neurons=neurons(sum(one.usage.micro_neurons for one in outputs)),
    )


def _call_piece(event: tokenizer_pb.OutputEvent) -> CallPiece | None:
    match event.WhichOneof("event"):
        case "call_begin":
            return CallPiece(event.call_begin.index, event.call_begin.id, event.call_begin.name)
        case "call_arguments":
            return CallPiece(event.call_arguments.index, arguments=event.call_arguments.text)
        case _:
            return None
