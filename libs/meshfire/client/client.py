"""The client. Owns its channels; knows nothing of workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self, TypeVar

from meshfire.api.router.v1 import inference_service_pb2 as pb
from meshfire.api.router.v1 import inference_service_pb2_grpc as rpc
from meshfire.client.events import Event, Model, event_from, model_from
from meshfire.client.prompts import Prompt, Sampling, Tool, sampling_to, set_prompt, set_tools
from meshfire.client.routers import Routers, following, open_routers
from meshfire.discovery.base import Registry
from meshfire.errors import InternalError, NoWorker, Unavailable
from meshfire.grammar.rules import OutputRule
from meshfire.rpc import output_rule
from meshfire.rpc.channels import ChannelPool

T = TypeVar("T")


class MeshfireClient:
    """Talks to one router, or to all that a registry names.

    `target` is `host:port`, a registry URL (`consul://127.0.0.1:8500`, `static:/path/topology.json`) or an open
    Registry. `wait_s`: how long a call waits for the first router to come into discovery.

    Example::

        async with MeshfireClient("consul://127.0.0.1:8500") as client:
            async for event in client.generate("smollm2-135m-instruct", "Once upon a time", Sampling(max_tokens=32)):
                match event:
                    case Delta(text=text):
                        sys.stdout.write(text)
                    case Finished(usage=usage):
                        sys.stdout.write(f"\\n{usage.num_output_tokens} tokens\\n")
    """

    def __init__(self, target: str | Registry, *, wait_s: float = 10.0) -> None:
        self._target = target
        self._wait_s = wait_s
        self._channels = ChannelPool()
        self._stack = AsyncExitStack()
        self._routers: Routers | None = None

    async def __aenter__(self) -> Self:
        self._stack.push_async_callback(self._channels.close)
        opening = open_routers(self._target) if isinstance(self._target, str) else following(self._target)
        self._routers = await self._stack.enter_async_context(opening)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._routers = None
        await self._stack.aclose()

    async def generate(
        self,
        model: str,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        session_key: str = "",
        cache_salt: str = "",
        asynchronous: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
        return_prompt_token_ids: bool = False,
        keep_special_tokens: bool = False,
        echo: bool = False,
        tools: Sequence[Tool] = (),
        thinking: bool | None = None,
        rule: OutputRule | None = None,
        timeout_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[Event, None]:
        """One output: Started, Deltas, Finished; before the first Delta the PromptParts, if `echo` or
        `Sampling.num_prompt_logprobs` asks for them. Leaving the loop early cancels it everywhere.

        `tools` and `thinking` (default: as the model's template says) are for chats; events then tell reasoning and
        tool calls apart from text. `rule` binds the answer, token by token.

        `metadata` goes along as gRPC metadata, e.g. `traceparent`. Another router is tried
        only while nothing was received. Raises the errors of `meshfire.errors`: BadInput, UnknownModel, QueueFull, …
        """
        request = pb.GenerateRequest(
            model=model,
            sampling=sampling_to(sampling or Sampling()),
            session_key=session_key,
            cache_salt=cache_salt,
            priority=pb.PRIORITY_ASYNCHRONOUS if asynchronous else pb.PRIORITY_ONLINE,
            return_prompt_token_ids=return_prompt_token_ids,
            keep_special_tokens=keep_special_tokens,
            echo=echo,
            rule=None if rule is None else output_rule.to_wire(rule),
        )
        set_tools(set_prompt(request, prompt, template_kwargs), tools, thinking)
        *others, last = await self._candidates()
        for address in (*others, last):
            call = self._stub(address).Generate(request, timeout=timeout_s, metadata=tuple((metadata or {}).items()))
            began = False
            try:
                async for message in call:
                    began = True
                    event = event_from(message)
                    if event is not None:
                        yield event
                return
            except Unavailable as error:
                # A model without workers is so on every router; asking each would only take each one's patience.
                if began or address == last or isinstance(error, NoWorker):
                    raise
            finally:
                call.cancel()

    async def count_tokens(
        self, model: str, prompt: Prompt, *, template_kwargs: Mapping[str, object] | None = None
    ) -> int:
        """Tokens of a chat or text."""
        request = set_prompt(pb.CountTokensRequest(model=model), prompt, template_kwargs)

        async def call(stub: rpc.InferenceServiceAsyncStub) -> pb.CountTokensResponse:
            return await stub.CountTokens(request)

        return (await self._anywhere(call)).num_tokens

    async def list_models(self) -> list[Model]:
        """Models that can be served now, by name."""

        async def call(stub: rpc.InferenceServiceAsyncStub) -> pb.ListModelsResponse:
            return await stub.ListModels(pb.ListModelsRequest())

        return [model_from(model) for model in (await self._anywhere(call)).models]

    async def _anywhere(self, call: Callable[[rpc.InferenceServiceAsyncStub], Awaitable[T]]) -> T:
        *others, last = await self._candidates()
        for address in others:
            try:
                return await call(self._stub(address))
            except Unavailable:
                continue
        return await call(self._stub(last))

    async def _candidates(self) -> list[str]:
        if self._routers is None:
            raise InternalError("use the client inside `async with`")
        return await self._routers.candidates(self._wait_s)

    def _stub(self, address: str) -> rpc.InferenceServiceAsyncStub:
        return rpc.InferenceServiceStub(self._channels.get(address))
