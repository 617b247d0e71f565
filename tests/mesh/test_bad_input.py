"""Bad input of every kind at both doors: a clear error that names the field, and a mesh that serves on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from meshfire import errors
from meshfire.api.common.v1 import tensor_pb2
from meshfire.api.expert_shard.v1 import expert_shard_service_pb2 as shard_pb
from meshfire.api.expert_shard.v1 import expert_shard_service_pb2_grpc as shard_rpc
from meshfire.api.prefill.v1 import prefill_service_pb2 as prefill_pb
from meshfire.api.prefill.v1 import prefill_service_pb2_grpc as prefill_rpc
from meshfire.client import Message, Sampling
from meshfire.rpc.channels import ChannelPool
from tests import oracles
from tests.mesh.asking import ask, post
from tests.mesh.harness import InProcessMesh, in_process_mesh

GREEDY = Sampling(max_tokens=4, temperature=0, ignore_eos=True)
CHAT = [Message("user", "Hi")]


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracles.make_deepseek_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def mesh(kimi: Path) -> AsyncIterator[InProcessMesh]:
    """A mesh that must still give its first answer, and hold no KV, when the test is over."""
    async with in_process_mesh({"m": kimi}, expert_shards=2) as running:
        expected = (await ask(running, CHAT, GREEDY)).token_ids
        yield running
        assert (await ask(running, CHAT, GREEDY)).token_ids == expected


async def test_wrong_requests_over_grpc(mesh: InProcessMesh) -> None:
    cases: list[tuple[Any, Sampling, str, type[errors.MeshfireError], str | None]] = [
        (CHAT, GREEDY, "nobody", errors.UnknownModel, None),
        ([], GREEDY, "m", errors.BadInput, "chat.messages"),
        ([Message("wizard", "x")], GREEDY, "m", errors.BadInput, "chat.messages[0].role"),
        ([1, 2, 5_000_000], GREEDY, "m", errors.BadInput, "token_ids.ids[2]"),
        (CHAT, Sampling(temperature=9), "m", errors.BadInput, "sampling.temperature"),
        (CHAT, Sampling(logit_bias={9999: 1.0}), "m", errors.BadInput, None),
        ("word " * 5000, GREEDY, "m", errors.PromptTooLong, None),
    ]
    for prompt, sampling, model, kind, field in cases:
        with pytest.raises(kind) as caught:
            await ask(mesh, prompt, sampling, model=model)
        assert field is None or caught.value.field == field, caught.value.field


async def test_wrong_requests_over_http(mesh: InProcessMesh) -> None:
    good = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    cases: list[tuple[dict[str, Any], int, str | None]] = [
        ({"json": {**good, "model": "nobody"}}, 404, "model"),
        ({"json": {**good, "messages": []}}, 400, "messages"),
        ({"json": {**good, "max_tokens": "many"}}, 400, "max_tokens"),
        ({"json": {**good, "temperature": 99}}, 400, "temperature"),
        ({"json": {**good, "tools": [{"type": "function"}]}}, 400, "tools[0].function"),
        ({"content": b'{"model": "m", ', "headers": {"content-type": "application/json"}}, 400, None),
        ({"content": b"[" * 100_000, "headers": {"content-type": "application/json"}}, 400, None),
        ({"json": {**good, "messages": [{"role": "user", "content": "x " * 20_000}]}}, 400, None),
        ({"content": b" " * (33 << 20), "headers": {"content-type": "application/json"}}, 413, None),
    ]
    for request, status, param in cases:
        answer = await post(mesh, "/v1/chat/completions", **request)
        assert answer.status_code == status, (str(request)[:80], answer.text[:200])
        error = answer.json()["error"]
        assert error["message"]
        assert param is None or error["param"] == param


async def test_wrong_hops_are_answered_one_by_one(mesh: InProcessMesh) -> None:
    def tensor(dtype: tensor_pb2.DataType.ValueType, shape: list[int], size: int) -> tensor_pb2.Tensor:
        return tensor_pb2.Tensor(dtype=dtype, shape=shape, data=bytes(size))

    ids = tensor(tensor_pb2.DATA_TYPE_INT32, [1, 1], 4)
    weights = tensor(tensor_pb2.DATA_TYPE_FLOAT32, [1, 1], 4)
    hidden = tensor(tensor_pb2.DATA_TYPE_FLOAT32, [1, 64], 256)
    short = tensor(tensor_pb2.DATA_TYPE_FLOAT32, [1, 64], 255)
    wide = tensor(tensor_pb2.DATA_TYPE_FLOAT32, [1, 65], 260)
    hops = [
        ({"layer": 1, "placement_epoch": 1, "hidden": short}, "INVALID_TENSOR"),
        ({"layer": 1, "placement_epoch": 1, "hidden": wide}, "INVALID_TENSOR"),
        ({"layer": 1, "placement_epoch": -3, "hidden": hidden}, "STALE_EPOCH"),
        ({"layer": 99, "placement_epoch": 1, "hidden": hidden}, "BAD_INPUT"),
        ({"layer": 1, "placement_epoch": 1, "hidden": hidden}, ""),
    ]
    async with grpc.aio.insecure_channel(mesh.address("expert-0")) as channel:
        call = shard_rpc.ExpertShardServiceStub(channel).Forward()
        for number, (fields, reason) in enumerate(hops):
            await call.write(shard_pb.ForwardRequest(hop_id=number, topk_ids=ids, topk_weights=weights, **fields))
            answer = await call.read()
            assert (answer.hop_id, answer.error.reason) == (number, reason)
        call.cancel()


async def test_kv_that_nobody_granted_is_not_read(mesh: InProcessMesh) -> None:
    channels = ChannelPool()
    stub = prefill_rpc.PrefillServiceStub(channels.get(mesh.address("prefill-0")))
    with pytest.raises(errors.MeshfireError) as caught:
        async for _ in stub.ReadKv(prefill_pb.ReadKvRequest(kv_lease_id="nothing", epoch=1, reader_id="me")):
            pass
    assert caught.value.code in ("INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION")
    await channels.close()


async def test_clients_that_leave_in_any_moment_leave_nothing(mesh: InProcessMesh) -> None:
    for wait_s in (0.0, 0.005, 0.02, 0.08, 0.2):
        task = asyncio.ensure_future(ask(mesh, CHAT, Sampling(max_tokens=400, temperature=0, ignore_eos=True)))
        await asyncio.sleep(wait_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(10):
        while busy := [one for one in metric_lines(mesh, "decode-0") if "running" in one and not one.endswith(" 0.0")]:
            await asyncio.sleep(0.05)
    assert not busy


def metric_lines(mesh: InProcessMesh, name: str) -> list[str]:
    text = mesh.meshes[name].telemetry.prometheus_text().decode()
    return [line for line in text.splitlines() if not line.startswith("#")]
