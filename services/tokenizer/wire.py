"""Tokenizer messages ↔ values: chats, output formats, events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from meshfire.api.tokenizer.v1 import tokenizer_service_pb2 as pb
from meshfire.errors import BadInput, InvalidPrompt
from meshfire.text.detokenizer import Detokenizer
from meshfire.text.kimi.detokenizer import ChatDetokenizer
from meshfire.text.kimi.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from meshfire.text.kimi.output import State
from services.tokenizer import rules
from services.tokenizer.core import ChatPrompt, EncodedChat, OutputStart, TextModel

_STATES = {State.REASONING: pb.OUTPUT_STATE_REASONING, State.CONTENT: pb.OUTPUT_STATE_CONTENT}


def encoder(model: TextModel, request: pb.TokenizeRequest) -> Callable[[], pb.TokenizeResponse]:
    """What encodes a prompt. Raises BadInput, InvalidPrompt."""
    match request.WhichOneof("input"):
        case "text":
            return lambda: _ruled(model, request, None, pb.TokenizeResponse(token_ids=model.encode_text(request.text)))
        case "chat":
            prompt = chat_of(request.chat)
            return lambda: _chat_response(model, request, model.encode_chat(prompt))
        case _ if request.HasField("rule"):
            return lambda: _ruled(model, request, None, pb.TokenizeResponse())
        case _:
            raise BadInput("nothing to encode: set chat or text", field="input")


def is_short(request: pb.TokenizeRequest, inline_chars: int) -> bool:
    """Whether it takes so little time that streams may wait for it: a rule takes milliseconds to compile."""
    return request.ByteSize() <= inline_chars and not request.HasField("rule") and not request.chat.tools


def chat_of(chat: pb.Chat) -> ChatPrompt:
    """Raises InvalidPrompt naming a tool whose parameters are no JSON."""
    return ChatPrompt(
        [_message(one) for one in chat.messages],
        chat.template_kwargs_json,
        not chat.omit_generation_prompt,
        [_tool(one, f"chat.tools[{index}]") for index, one in enumerate(chat.tools)],
        chat.thinking if chat.HasField("thinking") else None,
    )


def detokenizer(model: TextModel, start: pb.DetokenizeStart) -> Detokenizer | ChatDetokenizer:
    """What decodes one output. Raises BadInput."""
    if start.HasField("output"):
        reasons = start.output.state == pb.OUTPUT_STATE_REASONING
        output = OutputStart(State.REASONING if reasons else State.CONTENT, start.output.first_call)
        tools = [_tool(one, f"output.tools[{index}]") for index, one in enumerate(start.output.tools)]
        return model.detokenizer(output, tools, start.stop)
    tokenizer = model.tokenizer
    return Detokenizer(
        tokenizer.vocabulary, tokenizer.specials, stop=start.stop, keep_special_tokens=start.keep_special_tokens
    )


def decoded(
    model: TextModel, decoder: Detokenizer | ChatDetokenizer, tokens: pb.DetokenizeTokens
) -> pb.DetokenizeResponse:
    """The answer to one batch of tokens."""
    pieces = [model.tokenizer.vocabulary.bytes_of(one) for one in tokens.lookup_ids]
    if isinstance(decoder, Detokenizer):
        text = decoder.add(tokens.token_ids, last=tokens.last)
        return pb.DetokenizeResponse(
            text=text.text, stop_hit=text.stop_hit, num_tokens_used=text.num_tokens_used, pieces=pieces
        )
    chat = decoder.add(tokens.token_ids, last=tokens.last)
    return pb.DetokenizeResponse(
        events=events_to_wire(chat.events),
        stop_hit=chat.stop_hit,
        num_tokens_used=chat.num_tokens_used,
        num_reasoning_tokens=chat.num_reasoning_tokens,
        pieces=pieces,
    )


def events_to_wire(events: Iterable[Event]) -> list[pb.OutputEvent]:
    """In order."""
    return [_event(one) for one in events]


def _chat_response(model: TextModel, request: pb.TokenizeRequest, chat: EncodedChat) -> pb.TokenizeResponse:
    response = pb.TokenizeResponse(token_ids=chat.token_ids)
    if chat.output is not None:
        state, tools = _STATES[chat.output.state], request.chat.tools
        response.output.CopyFrom(pb.OutputFormat(state=state, first_call=chat.output.first_call, tools=tools))
    return _ruled(model, request, chat.output, response)


def _ruled(
    model: TextModel, request: pb.TokenizeRequest, start: OutputStart | None, response: pb.TokenizeResponse
) -> pb.TokenizeResponse:
    """The response with the rule of the output, if it has one."""
    rule = rules.filled_in(model, request, start)
    if rule is not None:
        response.rule.CopyFrom(rule)
    return response


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if value := getattr(message, name):
            found[name] = value
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": one.name, "arguments": one.arguments_json},
                **({"id": one.id} if one.id else {}),
            }
            for one in message.tool_calls
        ]
    return found


def _tool(tool: pb.Tool, field: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if not tool.name:
        raise InvalidPrompt("a tool needs a name", field=f"{field}.name")
    if tool.description:
        function["description"] = tool.description
    if tool.parameters_json:
        function["parameters"] = _schema(tool.parameters_json, f"{field}.parameters_json")
    return {"type": "function", "function": function}


def _schema(text: str, field: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidPrompt(f"no JSON: {error}", field=field) from None
    if not isinstance(schema, dict):
        raise InvalidPrompt("no JSON object", field=field)
    return schema


def _event(event: Event) -> pb.OutputEvent:
    match event:
        case Reasoning(text):
            return pb.OutputEvent(reasoning=text)
        case Content(text):
            return pb.OutputEvent(content=text)
        case CallBegin(index, call_id, name):
            return pb.OutputEvent(call_begin=pb.ToolCallBegin(index=index, id=call_id, name=name))
        case CallArguments(index, text):
            return pb.OutputEvent(call_arguments=pb.ToolCallArguments(index=index, text=text))
        case CallEnd(index, is_valid):
            return pb.OutputEvent(call_end=pb.ToolCallEnd(index=index, is_valid=is_valid))
