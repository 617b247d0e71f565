"""TokenizerService: wire ↔ domain, and the composition root of the service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar

import grpc.aio
from opentelemetry.trace import SpanKind

from meshfire.api.tokenizer.v1 import tokenizer_service_pb2 as pb
from meshfire.api.tokenizer.v1 import tokenizer_service_pb2_grpc as rpc
from meshfire.errors import BadInput, TestHooksOff
from meshfire.runtime.gate import Gate
from meshfire.runtime.serve import Mesh, Service
from meshfire.telemetry import names
from meshfire.telemetry.spans import span
from meshfire.text import script
from services.tokenizer import wire
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.core import TextModel, TextModels
from services.tokenizer.instruments import TokenizerInstruments

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
T = TypeVar("T")

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["TokenizerService"].full_name


class TokenizerServicer(rpc.TokenizerServiceServicer):
    """Ready-made parts come in; `build` makes them."""

    def __init__(self, models: TextModels, settings: TokenizerSettings, mesh: Mesh) -> None:
        self._models = models
        self._settings = settings
        self._test_hooks = mesh.test_hooks
        self._tracer = mesh.telemetry.tracer
        self._instruments = TokenizerInstruments(mesh.telemetry.meter)
        self.gate = Gate("tokenizer")

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Render and encode."""
        attributes: Mapping[str, str | int] = {
            names.ATTR_MODEL: request.model,
            names.ATTR_MESSAGES: len(request.chat.messages),
        }
        with self.gate.entered(), self._span(names.SPAN_TOKENIZER_TOKENIZE, context, attributes) as current:
            model = self._models.find(request.model)
            encode = wire.encoder(model, request)
            response = await _off_loop(not wire.is_short(request, self._settings.inline_chars), encode)
            current.set_attribute(names.ATTR_TOKENS_PROMPT, len(response.token_ids))
            self._instruments.tokens(model.name, "Tokenize", len(response.token_ids))
            return response

    async def Detokenize(
        self, request_iterator: AsyncIterator[pb.DetokenizeRequest], context: Context
    ) -> AsyncIterator[pb.DetokenizeResponse]:
        """Answer each batch of tokens with the text that became certain."""
        with self.gate.entered(), self._span(names.SPAN_TOKENIZER_DETOKENIZE, context, {}) as current:
            start = await _start_of(request_iterator)
            current.set_attribute(names.ATTR_MODEL, start.model)
            model = self._models.find(start.model)
            decoder = wire.detokenizer(model, start)
            num_tokens = 0
            try:
                async for request in request_iterator:
                    tokens = _tokens_of(request)
                    num_tokens += len(tokens.token_ids)
                    is_long = len(tokens.token_ids) > self._settings.inline_tokens
                    yield await _off_loop(is_long, partial(wire.decoded, model, decoder, tokens))
            finally:
                # Once a stream: for each token they would cost as much as its text.
                current.set_attribute(names.ATTR_TOKENS_OUTPUT, num_tokens)
                self._instruments.tokens(start.model, "Detokenize", num_tokens)

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        """Facts of one vocabulary, or of all."""
        found = [self._models.find(request.model)] if request.model else self._models.by_name.values()
        return pb.DescribeResponse(vocabularies=[_facts(model) for model in found])

    async def TokenizeScript(self, request: pb.TokenizeScriptRequest, context: Context) -> pb.TokenizeScriptResponse:
        """Test hook."""
        if not self._test_hooks:
            raise TestHooksOff("this mesh runs without test hooks")
        with self.gate.entered():
            tokenizer = self._models.find(request.model).tokenizer
            # On a thread: the first script of a model makes the map from bytes to tokens.
            parsed = await asyncio.to_thread(script.parse, request.script_json, tokenizer)
            return pb.TokenizeScriptResponse(
                token_ids=parsed.token_ids, ends_with_eos=parsed.ends_with_eos, wants=parsed.wants
            )

    def _span(self, name: str, context: Context, attributes: Mapping[str, str | int]) -> Any:
        parent = str(dict(context.invocation_metadata() or ()).get("traceparent", ""))
        return span(self._tracer, name, parent=parent, attributes=attributes, kind=SpanKind.SERVER)


@asynccontextmanager
async def build(settings: TokenizerSettings, mesh: Mesh) -> AsyncIterator[Service]:
    """Read the tokenizers and serve them."""
    models = await asyncio.to_thread(TextModels.load, settings.models)
    servicer = TokenizerServicer(models, settings, mesh)
    yield Service(
        add_to=lambda server: rpc.add_TokenizerServiceServicer_to_server(servicer, server),
        names=(SERVICE_NAME,),
        metadata={"model": ",".join(models.by_name)},
        drain=servicer.gate.close,
    )


async def _off_loop(is_long: bool, work: Callable[[], T]) -> T:
    """Short work at once; long work on a thread, so that other streams go on."""
    return await asyncio.to_thread(work) if is_long else work()


async def _start_of(requests: AsyncIterator[pb.DetokenizeRequest]) -> pb.DetokenizeStart:
    async for request in requests:
        if request.WhichOneof("frame") == "start":
            return request.start
        break
    raise BadInput("the first message of a detokenize stream says how to start", field="start")


def _tokens_of(request: pb.DetokenizeRequest) -> pb.DetokenizeTokens:
    if request.WhichOneof("frame") != "tokens":
        raise BadInput("every message after the first carries tokens", field="tokens")
    return request.tokens


def _facts(model: TextModel) -> pb.Vocabulary:
    return pb.Vocabulary(
        model=model.name,
        vocab_size=model.tokenizer.vocabulary.size,
        end_token_ids=model.tokenizer.end_token_ids,
        checksum=model.tokenizer.checksum,
        has_chat_template=model.template is not None,
    )
