"""Parts that both endpoints' answers share: usage, finish reasons, token strings, log-probabilities. Pure."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

from meshfire.api.common.v1 import sampling_pb2
from services.gateway.dialect import Json
from services.gateway.outputs import CallPiece, Output, Piece, ToolCall, total

#: What OpenAI reports for a token of no probability; JSON has no infinity.
LOWEST_LOGPROB = -9999.0

_FINISH_REASONS = {
    sampling_pb2.FINISH_REASON_STOP: "stop",
    sampling_pb2.FINISH_REASON_LENGTH: "length",
    sampling_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


def usage(outputs: Sequence[Output]) -> Json:
    """Each prompt counts once, however many outputs it has."""
    sums = total(outputs)
    return {
        "prompt_tokens": sums.num_prompt_tokens,
        "completion_tokens": sums.num_output_tokens,
        "total_tokens": sums.num_prompt_tokens + sums.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sums.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": sums.num_reasoning_tokens},
        "neurons": sums.neurons,
    }


def finish_reason(output: Output) -> str | None:
    """None while the output grows."""
    return None if output.finished is None else _FINISH_REASONS.get(output.finished.finish_reason, "stop")


def stop_reason(output: Output) -> str | None:
    """The stop text that was hit (vLLM's field)."""
    if output.finished is None or not output.finished.HasField("stop_hit"):
        return None
    return output.finished.stop_hit


def prompt_token_ids(output: Output) -> list[int]:
    """Of the prompt as it was encoded."""
    return [] if output.started is None else list(output.started.prompt_token_ids)


def token_text(piece: bytes) -> str:
    """A token as a string. One that is only a part of a character is written `bytes:\\xf0\\x9f`, as OpenAI does."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def finite(logprob: float) -> float:
    """As a number that JSON can hold."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def chat_logprobs(tokens: Sequence[sampling_pb2.TokenLogprobs]) -> Json:
    """`choices[].logprobs` of the chat endpoint."""
    return {"content": [_chat_token(token) for token in tokens], "refusal": None}


def _chat_token(token: sampling_pb2.TokenLogprobs) -> Json:
    top = zip(token.top_pieces, token.top_logprobs)
    return _entry(token.piece, token.logprob) | {"top_logprobs": [_entry(piece, logprob) for piece, logprob in top]}


def _entry(piece: bytes, logprob: float) -> Json:
    return {"token": token_text(piece), "logprob": finite(logprob), "bytes": list(piece)}


class TextOffsets:
    """Where each token of an output begins in its text, in characters. A token inside a character begins where that
    character does."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def next(self, piece: bytes) -> int:
        """Offset of the token with these bytes."""
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(piece))
        return offset


def completion_logprobs(
    tokens: Sequence[sampling_pb2.TokenLogprobs], offsets: TextOffsets, first_piece: bytes | None = None
) -> Json:
    """`choices[].logprobs` of the old endpoint; the chosen token is among the top ones even if it was not likely.

    `first_piece` is of a prompt's first token, before `tokens`: it has no log-probability, which is null.
    """
    first = [] if first_piece is None else [first_piece]
    pieces = [*first, *(token.piece for token in tokens)]
    unknown = [None] * len(first)
    return {
        "tokens": [token_text(piece) for piece in pieces],
        "token_logprobs": unknown + [finite(token.logprob) for token in tokens],
        "top_logprobs": unknown + [_top(token) for token in tokens],
        "text_offset": [offsets.next(piece) for piece in pieces],
    }


def _top(token: sampling_pb2.TokenLogprobs) -> dict[str, float]:
    top = {token_text(piece): finite(logprob) for piece, logprob in zip(token.top_pieces, token.top_logprobs)}
    top.setdefault(token_text(token.piece), finite(token.logprob))
    return top


def message(output: Output) -> Json:
    """The assistant's message of a whole chat answer."""
    text = "".join(output.text)
    calls = [_call(one) for one in output.calls]
    answer: Json = {"role": "assistant", "content": None if calls and not text else text, "refusal": None}
    if thought := "".join(output.reasoning):
        answer["reasoning_content"] = thought
    return answer | {"tool_calls": calls} if calls else answer


def _call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def deltas(piece: Piece) -> list[Json]:
    """What a piece adds to a streamed message, a kind at a time: reasoning, content, then each part of a call."""
    found: list[Json] = []
    if piece.reasoning:
        found.append({"reasoning_content": piece.reasoning})
    if piece.text:
        found.append({"content": piece.text})
    return found + [{"tool_calls": [_call_delta(part)]} for part in piece.calls]


def _call_delta(part: CallPiece) -> Json:
    """Id, type and name come once, with a call's first part; later parts carry only arguments."""
    if part.call_id:
        function = {"name": part.name, "arguments": part.arguments}
        return {"index": part.index, "id": part.call_id, "type": "function", "function": function}
    return {"index": part.index, "function": {"arguments": part.arguments}}


def says_something(piece: Piece, *, with_ids: bool, with_logprobs: bool) -> bool:
    """Whether a stream's client would miss this piece: text may lag behind tokens, and then a delta is empty."""
    return bool(
        piece.text
        or piece.reasoning
        or piece.calls
        or (with_ids and piece.token_ids)
        or (with_logprobs and piece.has_logprobs)
    )
