"""The tokenizer services that discovery names, and unary calls to any one of them.

Owns choosing and retrying. A call is pure, so it may be repeated elsewhere whenever an instance is away. Text passes
through here unread.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from meshfire.api.common.v1 import output_rule_pb2
from meshfire.api.tokenizer.v1 import tokenizer_service_pb2 as pb
from meshfire.api.tokenizer.v1 import tokenizer_service_pb2_grpc as rpc
from meshfire.discovery.base import Instance, Registry
from meshfire.errors import DeadlineExceeded, MeshfireError, NotFound, NoWorker, Unavailable
from meshfire.rpc.channels import ChannelPool
from services.router.work import Script

_log = logging.getLogger(__name__)
T = TypeVar("T")

TOKENIZER_SERVICE = "meshfire-tokenizer"

#: another instance, or the same later, may do better
MAY_MEND = (Unavailable, DeadlineExceeded, NotFound)

_PAUSE_S = 0.1


@dataclass(frozen=True)
class Encoded:
    """A prompt. `output`: how what follows it is to be read; None = as text."""

    token_ids: tuple[int, ...]
    output: pb.OutputFormat | None = None
    #: what the output must look like; None = nothing is bound
    rule: output_rule_pb2.OutputRule | None = None


class Tokenizers:
    """`run()` follows discovery and lives in a task group; the rest is called on the same loop."""

    def __init__(self, registry: Registry, channels: ChannelPool, *, timeout_s: float, wait_s: float) -> None:
        self.timeout_s = timeout_s
        self._registry = registry
        self._channels = channels
        self._wait_s = wait_s
        self._instances: tuple[Instance, ...] = ()

    async def run(self) -> None:
        """Follow discovery until cancelled."""
        async for instances in self._registry.watch(TOKENIZER_SERVICE):
            self._instances = instances

    def addresses(self, model: str) -> list[str]:
        """Instances that say they serve the model, or all if none says so; in random order, to share the load."""
        serving = [one for one in self._instances if model in one.metadata.get("model", model).split(",")]
        found = [one.address for one in serving or self._instances]
        random.shuffle(found)
        return found

    def stub(self, address: str) -> rpc.TokenizerServiceAsyncStub:
        """The service at an address."""
        return rpc.TokenizerServiceStub(self._channels.get(address))

    async def tokenize(self, request: pb.TokenizeRequest, traceparent: str) -> Encoded:
        """A prompt as token ids. BadInput as the tokenizer says; NoWorker if none answers for a while."""

        async def call(stub: rpc.TokenizerServiceAsyncStub) -> pb.TokenizeResponse:
            return await stub.Tokenize(request, timeout=self.timeout_s, metadata=trace_metadata(traceparent))

        response = await self._anywhere(request.model, call)
        output = response.output if response.HasField("output") else None
        return Encoded(tuple(response.token_ids), output, response.rule if response.HasField("rule") else None)

    async def script(self, model: str, script_json: str, traceparent: str) -> Script:
        """A test script's steps."""
        request = pb.TokenizeScriptRequest(model=model, script_json=script_json)

        async def call(stub: rpc.TokenizerServiceAsyncStub) -> pb.TokenizeScriptResponse:
            return await stub.TokenizeScript(request, timeout=self.timeout_s, metadata=trace_metadata(traceparent))

        response = await self._anywhere(model, call)
        wants = response.wants if response.HasField("wants") else None
        return Script(tuple(response.token_ids), response.ends_with_eos, wants)

    async def _anywhere(self, model: str, call: Callable[[rpc.TokenizerServiceAsyncStub], Awaitable[T]]) -> T:
        last: MeshfireError | None = None
        try:
            async with asyncio.timeout(self._wait_s):
                while True:
                    for address in self.addresses(model):
                        try:
                            return await call(self.stub(address))
                        except MAY_MEND as error:
                            _log.warning("tokenizer at %s: %s", address, error)
                            last = error
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            why = "none is in discovery" if last is None else last.message
            raise NoWorker(f"no tokenizer answers for model {model!r}: {why}", retry_after_s=1.0) from None


def trace_metadata(traceparent: str) -> tuple[tuple[str, str], ...]:
    """gRPC metadata that puts the callee's spans below ours."""
    return (("traceparent", traceparent),) if traceparent else ()
