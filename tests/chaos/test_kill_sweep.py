"""Processes rehearse their own death at many moments of a stream; the stream never changes by a token.

Real processes, `kill -9` from inside (the fault header), restarted by the supervisor. Takes minutes: `make chaos`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshfire.client import Delta, Finished, MeshfireClient, Message, Sampling
from meshfire.modelstore.make import make_model
from tests.e2e.mesh_process import HOP_TRANSPORTS, MeshProcess, start_mesh

NUM_TOKENS = 64
FAULTS = [
    *(f"decode:kill@token={index}" for index in (0, 1, 7, 31, 62, 63)),
    *(f"expert-{shard}:kill@token={index}" for shard in (0, 1) for index in (0, 13, 63)),
    "expert-0:kill@layer=1",
    "expert-1:kill@layer=2",
    "prefill:kill",
    "decode:stop@token=20",
]

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=HOP_TRANSPORTS)
def mesh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """A made Kimi model: two prefill workers, one decode worker, two shards without replicas, one way to them."""
    folder = tmp_path_factory.mktemp("chaos")
    make_model("kimi-tiny", folder / "kimi", seed=1)
    model = {"model": str(folder / "kimi"), "name": "kimi", "prefill": 2, "expert_shards": 2}
    topology = {"mesh": "chaos", "http_port": 0, "test_hooks": True, "models": [model]}
    with start_mesh(topology, folder, HOP_TRANSPORTS[request.param]) as running:
        yield running


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.timeout(180)
async def test_a_stream_survives_a_death_without_a_changed_token(
    mesh: MeshProcess, fault: str, temperature: float
) -> None:
    expected, _ = await tokens(mesh, temperature)
    got, finished = await tokens(mesh, temperature, {"x-meshfire-fault": fault})
    assert got == expected
    assert finished.finish_reason == "length"
    mesh.wait_serving()


async def tokens(
    mesh: MeshProcess, temperature: float, metadata: dict[str, str] | None = None
) -> tuple[list[int], Finished]:
    sampling = Sampling(max_tokens=NUM_TOKENS, temperature=temperature, seed=5, ignore_eos=True)
    out: list[int] = []
    finished: Finished | None = None
    async with MeshfireClient(mesh.grpc_address) as client:
        chat = [Message("user", "go on")]
        async for event in client.generate("kimi", chat, sampling, metadata=metadata, timeout_s=120):
            if isinstance(event, Delta):
                out += event.token_ids
            elif isinstance(event, Finished):
                finished = event
    assert finished is not None
    return out, finished
