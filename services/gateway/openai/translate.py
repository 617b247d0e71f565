"""OpenAI requests → `GenerateRequest`s. Pure; the way back is in `objects`, `chat` and `completions`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence

from meshfire.api.common.v1 import sampling_pb2
from meshfire.api.router.v1 import inference_service_pb2 as pb
from meshfire.api.tokenizer.v1 import tokenizer_service_pb2 as tokenizer_pb
from services.gateway.dialect import Call
from services.gateway.errors import HttpError
from services.gateway.openai.rules import rule_of
from services.gateway.openai.schema import ChatRequest, CompletionRequest, Message, Prompt, Request
from services.gateway.openai.tools import Tool

#: OpenAI's default for the old endpoint; chat goes on to the end of the context window.
COMPLETION_MAX_TOKENS = 16
#: top_p 0 is allowed here and not in the contract: the smallest set that reaches it is the likeliest token.
SMALLEST_TOP_P = 1e-6

#: Fields that both sides call the same.
_SAME = (
    "min_tokens",
    "temperature",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)


def chat_calls(request: ChatRequest) -> list[Call]:
    """n calls with one prompt."""
    base = _base(request)
    base.chat.messages.extend(_turn(message) for message in request.messages)
    if request.tool_choice != "none":  # what may not be called is not shown
        base.chat.tools.extend(_tool(tool) for tool in request.tools or ())
    if request.thinking is not None:
        base.chat.thinking = request.thinking.type == "enabled"
    base.chat.template_kwargs_json = _template_kwargs(request)
    base.chat.omit_generation_prompt = request.add_generation_prompt is False
    limit = request.max_completion_tokens or request.max_tokens
    if limit is not None:
        base.sampling.max_tokens = limit
    if request.logprobs:
        base.sampling.num_logprobs = request.top_logprobs or 0
    return list(_fan_out([base], request.n or 1))


def completion_calls(request: CompletionRequest) -> list[Call]:
    """best_of (or n) calls per prompt."""
    base = _base(request)
    base.sampling.max_tokens = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    base.echo = bool(request.echo)
    if request.logprobs is not None:
        base.sampling.num_logprobs = request.logprobs
        if request.echo:
            base.sampling.num_prompt_logprobs = request.logprobs
    elif ranked(request):
        base.sampling.num_logprobs = 0
    return list(_fan_out(list(_prompts(base, request.prompt)), request.best_of or request.n or 1))


def ranked(request: CompletionRequest) -> bool:
    """True = more outputs are generated than returned."""
    return (request.best_of or 1) > (request.n or 1)


def check_outputs(calls: Sequence[Call], limit: int) -> None:
    """Raises 400 when a request asks for more outputs than allowed."""
    if len(calls) > limit:
        param = "prompt" if calls[-1].prompt_index else "n"
        raise HttpError(400, f"{param}: {len(calls)} outputs asked for, at most {limit}", param, "invalid_value")


def _template_kwargs(request: ChatRequest) -> str:
    try:
        return json.dumps(request.chat_template_kwargs, allow_nan=False) if request.chat_template_kwargs else ""
    except ValueError:  # a literal such as 1e999, which is valid JSON and no number
        field = "chat_template_kwargs"
        raise HttpError(400, f"{field}: holds a number that is not finite", field, "invalid_value") from None


def _base(request: Request) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        model=request.model,
        sampling=_sampling(request),
        session_key=request.prompt_cache_key or "",
        priority=pb.PRIORITY_ONLINE,
        return_prompt_token_ids=bool(request.return_token_ids),
        cache_salt=request.cache_salt or "",
        reject_if_busy=bool(request.options and request.options.rejectIfBusy),
        keep_special_tokens=request.skip_special_tokens is False,
        rule=rule_of(request),
    )


def _sampling(request: Request) -> sampling_pb2.SamplingParams:
    """What is not given stays unset: the model's own default then holds."""
    sampling = sampling_pb2.SamplingParams(**{name: getattr(request, name) for name in _SAME})
    if request.top_p is not None:
        sampling.top_p = max(request.top_p, SMALLEST_TOP_P)
    if request.top_k is not None:
        sampling.top_k = max(request.top_k, 0)  # -1 is vLLM's word for "all"
    for token_id, bias in (request.logit_bias or {}).items():
        sampling.logit_bias[int(token_id)] = bias
    sampling.stop.extend([request.stop] if isinstance(request.stop, str) else request.stop or [])
    sampling.stop_token_ids.extend(request.stop_token_ids or [])
    sampling.ignore_eos = bool(request.ignore_eos)
    return sampling


def _turn(message: Message) -> tokenizer_pb.ChatMessage:
    """Parts are joined without a separator; no content (an assistant's null) is the empty text, never "None"."""
    content = message.content or ""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    return tokenizer_pb.ChatMessage(
        role=role,
        content=text,
        name=message.name or "",
        reasoning_content=message.reasoning_content or message.reasoning or "",
        tool_calls=[
            tokenizer_pb.ToolCall(id=one.id or "", name=one.function.name, arguments_json=one.function.arguments)
            for one in message.tool_calls or ()
        ],
        tool_call_id=message.tool_call_id or "",
    )


def _tool(tool: Tool) -> tokenizer_pb.Tool:
    function = tool.function
    parameters = "" if function.parameters is None else json.dumps(function.parameters, ensure_ascii=False)
    return tokenizer_pb.Tool(
        name=function.name,
        description=function.description or "",
        parameters_json=parameters,
        strict=bool(function.strict),
    )


def _prompts(base: pb.GenerateRequest, prompt: Prompt) -> Iterator[pb.GenerateRequest]:
    for one in _separate(prompt):
        request = pb.GenerateRequest()
        request.CopyFrom(base)
        if isinstance(one, str):
            request.text = one
        else:
            request.token_ids.ids.extend(one)
        yield request


def _separate(prompt: Prompt) -> Sequence[str | Sequence[int]]:
    """One entry per prompt: a list of ids is one prompt, a list of texts or of lists is several."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt


def _fan_out(prompts: Sequence[pb.GenerateRequest], num_outputs: int) -> Iterator[Call]:
    """Output i of a prompt samples with seed + i, so that n outputs of one seed differ and can be had again.

    All outputs of a prompt go to one prefill worker, which computes what they share once.
    """
    for prompt_index, prompt in enumerate(prompts):
        session_key = prompt.session_key or (_key_of(prompt) if num_outputs > 1 else "")
        for i in range(num_outputs):
            request = pb.GenerateRequest()
            request.CopyFrom(prompt)
            request.session_key = session_key
            if request.sampling.HasField("seed"):
                request.sampling.seed = _wrapped(request.sampling.seed + i)
            yield Call(prompt_index, request)


def _key_of(prompt: pb.GenerateRequest) -> str:
    """The same for the same prompt."""
    return f"prompt-{hashlib.blake2b(prompt.SerializeToString(deterministic=True), digest_size=16).hexdigest()}"


def _wrapped(seed: int) -> int:
    """As 64-bit two's complement."""
    return (seed + 2**63) % 2**64 - 2**63
