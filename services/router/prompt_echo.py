"""The prompt as a part of the answer: its text, and the log-probabilities of its tokens.

Owns what GeneratePrompt says and how it is cut; where text and bytes come from is the tokenizer's business.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from meshfire.api.router.v1 import inference_service_pb2 as pb
from meshfire.api.tokenizer.v1 import tokenizer_service_pb2 as tokenizer_pb
from services.router import wire
from services.router.output import Logprobs
from services.router.text_stream import TextStream
from services.router.tokenizers import Tokenizers

#: With 20 likeliest tokens at each place about 200 KB: any client's gRPC takes it.
PART_TOKENS = 512


async def prompt_parts(
    tokenizers: Tokenizers,
    request: pb.GenerateRequest,
    prompt: Sequence[int],
    logprobs: Sequence[Logprobs],
    traceparent: str,
) -> AsyncGenerator[pb.GenerateResponse, None]:
    """What to tell of `prompt`, in order; `logprobs` are those of its tokens from the second on, if asked for."""
    text = await _text_of(tokenizers, request, prompt, traceparent) if request.echo else ""
    if not request.sampling.HasField("num_prompt_logprobs"):
        yield pb.GenerateResponse(prompt=pb.GeneratePrompt(text=text))
        return
    lookup = TextStream(tokenizers, tokenizer_pb.DetokenizeStart(model=request.model), traceparent)
    try:
        for start in range(0, len(prompt), PART_TOKENS):
            token_ids = prompt[start : start + PART_TOKENS]
            known = logprobs[max(0, start - 1) : start + len(token_ids) - 1]
            part = await _part(lookup, token_ids, known)
            part.text = text if start == 0 else ""
            yield pb.GenerateResponse(prompt=part)
        await lookup.finish()
    finally:
        lookup.close()


async def _part(lookup: TextStream, token_ids: Sequence[int], known: Sequence[Logprobs]) -> pb.GeneratePrompt:
    """`known` are of the last tokens of the part: of all but the prompt's first."""
    ids = list(dict.fromkeys([*token_ids, *(top_id for one in known for top_id in one.top_ids)]))
    pieces = dict(zip(ids, (await lookup.feed([], lookup_ids=ids)).pieces, strict=True))
    part = pb.GeneratePrompt(token_ids=token_ids)
    scored = token_ids[len(token_ids) - len(known) :]
    part.logprobs.extend(wire.logprobs_to(token_id, one, pieces) for token_id, one in zip(scored, known, strict=True))
    if len(known) < len(token_ids):
        part.first_piece = pieces[token_ids[0]]
    return part


async def _text_of(tokenizers: Tokenizers, request: pb.GenerateRequest, prompt: Sequence[int], traceparent: str) -> str:
    """A text as it was sent; what came as a chat or as token ids is decoded."""
    if request.WhichOneof("prompt") == "text":
        return request.text
    start = tokenizer_pb.DetokenizeStart(model=request.model, keep_special_tokens=request.keep_special_tokens)
    stream = TextStream(tokenizers, start, traceparent)
    try:
        text = (await stream.feed(prompt, last=True)).text
        await stream.finish()
        return text
    finally:
        stream.close()
