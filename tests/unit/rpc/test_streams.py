"""Writing to a stream that has ended is one error, whenever it is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from meshfire.api.expert_shard.v1 import expert_shard_service_pb2 as pb
from meshfire.api.expert_shard.v1 import expert_shard_service_pb2_grpc as rpc
from meshfire.errors import Draining, MeshfireError, Unavailable
from meshfire.rpc import streams
from meshfire.rpc.interceptors import ErrorsToStatus


class Refusing(rpc.ExpertShardServiceServicer):
    """Ends the stream after the first message."""

    async def Forward(self, request_iterator, context) -> AsyncIterator[pb.ForwardResponse]:
        async for _ in request_iterator:
            raise Draining("this shard stops")
        yield pb.ForwardResponse()


@pytest.mark.parametrize("killed", [False, True], ids=["ended with a status", "server gone"])
async def test_a_write_to_an_ended_stream_is_unavailable(killed: bool) -> None:
    server = grpc.aio.server(interceptors=[ErrorsToStatus()])
    port = server.add_insecure_port("127.0.0.1:0")
    rpc.add_ExpertShardServiceServicer_to_server(Refusing(), server)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = rpc.ExpertShardServiceStub(channel).Forward()
        with pytest.raises(Unavailable) as caught:
            async with asyncio.timeout(10):
                while True:
                    await streams.write(call, pb.ForwardRequest())
                    if killed:
                        await server.stop(None)
                    await asyncio.sleep(0.01)
        assert isinstance(caught.value, MeshfireError)
        await streams.done_writing(call)
    await server.stop(None)
