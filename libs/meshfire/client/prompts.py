"""What a caller asks for, as values, and the messages that they become. Ranges are checked by the router."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from meshfire.api.common.v1 import sampling_pb2
from meshfire.api.router.v1 import inference_service_pb2 as pb
from meshfire.api.tokenizer.v1 import tokenizer_service_pb2 as tokenizer_pb
from meshfire.errors import BadInput


@dataclass(frozen=True)
class ToolCall:
    """A call that an assistant made: `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters`: JSON Schema of its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] | None = None


@dataclass(frozen=True)
class Message:
    """One turn of a chat. `role` is system, developer, user, assistant or tool."""

    role: str
    content: str
    name: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    #: of a tool's answer; "" = it answers the next call that is open
    tool_call_id: str = ""


#: A chat, a text as it is, or token ids as they are.
Prompt: TypeAlias = Sequence[Message] | str | Sequence[int]

_R = TypeVar("_R", pb.GenerateRequest, pb.CountTokensRequest)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. None = the model's own default. Ranges: protos/…/common/v1/sampling.proto."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    #: 0 = always the likeliest token
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None


def sampling_to(sampling: Sampling) -> sampling_pb2.SamplingParams:
    """As the router reads it. BadInput if a number does not fit its field at all."""
    try:
        return sampling_pb2.SamplingParams(
            **{name: value for name, value in vars(sampling).items() if value is not None}
        )
    except (TypeError, ValueError) as error:
        raise BadInput(f"sampling: {error}", field="sampling") from None


def set_prompt(request: _R, prompt: Prompt, template_kwargs: Mapping[str, object] | None) -> _R:
    """Put the prompt into a request. An empty sequence is an empty chat, which the router refuses."""
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and all(isinstance(one, int) for one in prompt):
        if not isinstance(request, pb.GenerateRequest):
            raise BadInput("token ids are counted already", field="prompt")
        request.token_ids.ids.extend(one for one in prompt if isinstance(one, int))
    else:
        request.chat.CopyFrom(_chat_to(prompt, template_kwargs))
    return request


def _chat_to(
    turns: Sequence[Message] | Sequence[int], template_kwargs: Mapping[str, object] | None
) -> tokenizer_pb.Chat:
    chat = tokenizer_pb.Chat(template_kwargs_json=json.dumps(template_kwargs) if template_kwargs else "")
    for index, turn in enumerate(turns):
        if not isinstance(turn, Message):
            raise BadInput(f"prompt[{index}] is a {type(turn).__name__}, expected a Message", field="prompt")
        chat.messages.add(
            role=turn.role,
            content=turn.content,
            name=turn.name,
            reasoning_content=turn.reasoning,
            tool_calls=[
                tokenizer_pb.ToolCall(id=one.id, name=one.name, arguments_json=one.arguments) for one in turn.tool_calls
            ],
            tool_call_id=turn.tool_call_id,
        )
    return chat


def set_tools(request: _R, tools: Sequence[Tool], thinking: bool | None) -> _R:
    """Offer functions, and say whether the model thinks first. BadInput for a prompt that is no chat."""
    if (tools or thinking is not None) and request.WhichOneof("prompt") != "chat":
        raise BadInput("tools and thinking need a chat", field="prompt")
    for tool in tools:
        parameters = "" if tool.parameters is None else json.dumps(tool.parameters)
        request.chat.tools.add(name=tool.name, description=tool.description, parameters_json=parameters)
    if thinking is not None:
        request.chat.thinking = thinking
    return request
