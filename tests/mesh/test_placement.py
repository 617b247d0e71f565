"""Where prompts go in a mesh with two prefill workers and two routers: to their prefix, and the receipt says why."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from meshfire.client import Finished, MeshfireClient, Sampling
from meshfire.cluster.topology import parse
from meshfire.telemetry import names
from tests import oracles
from tests.mesh.harness import InProcessMesh, mesh_of

SHARED = list(range(10, 90))  # five blocks


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[InProcessMesh]:
    model = oracles.make_deepseek_checkpoint(tmp_path_factory.mktemp("placement") / "model")
    topology = parse(
        {
            "mesh": "placement",
            "http_port": 0,
            "routers": 2,
            "models": [{"model": str(model), "name": "m", "prefill": 2, "expert_shards": 0}],
        }
    )
    async with mesh_of(topology) as running:
        yield running


async def ask(mesh: InProcessMesh, router: str, prompt: list[int], session: str = "") -> tuple[str, str, int, int]:
    """Worker, why, cached tokens expected and found."""
    sampling = Sampling(max_tokens=1, temperature=0, ignore_eos=True)
    async with MeshfireClient(mesh.address(router)) as client:
        events = [event async for event in client.generate("m", prompt, sampling, session_key=session)]
    finished = events[-1]
    assert isinstance(finished, Finished)
    receipt = finished.receipt
    return receipt.prefill_worker_id, receipt.placement, receipt.num_cached_expected, finished.usage.num_cached_tokens


@pytest.mark.asyncio(loop_scope="module")
async def test_both_routers_send_a_prompt_to_its_prefix(mesh: InProcessMesh) -> None:
    first, why, expected, found = await ask(mesh, "router-0", [*SHARED, 1])
    assert (why, expected, found) == ("load", 0, 0)
    await asyncio.sleep(0.3)  # the worker's events reach both routers
    for router in ("router-1", "router-0", "router-1"):
        worker, why, expected, found = await ask(mesh, router, [*SHARED, 2])
        assert (worker, why) == (first, "cache")
        assert expected == found == 80


@pytest.mark.asyncio(loop_scope="module")
async def test_both_routers_agree_on_a_sessions_home(mesh: InProcessMesh) -> None:
    homes = set()
    for number in range(8):
        prompt = list(range(100 + number, 140 + number))
        one = await ask(mesh, "router-0", prompt, session=f"s{number}")
        other = await ask(mesh, "router-1", prompt, session=f"s{number}")
        assert (one[0], one[1]) == (other[0], other[1]) == (one[0], "session")
        homes.add(one[0])
    assert len(homes) == 2


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_and_its_trace_say_where_it_went(mesh: InProcessMesh) -> None:
    body = {"model": "m", "prompt": [*SHARED, 3], "max_tokens": 1, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=40, trust_env=False) as client:
        answer = await client.post(f"{mesh.http_url}/v1/completions", json=body)
    receipt = answer.headers["x-meshfire-receipt"]
    assert re.fullmatch(r'"[^"]+";decode="[^"]+";why=cache;cached-expected=80;.*;failovers=0;kv-bytes=\d+', receipt)
    for one in mesh.meshes.values():
        await asyncio.to_thread(one.telemetry.flush)
    trace_id = answer.headers["x-meshfire-trace-id"]
    (span,) = [
        one
        for one in mesh.spans.ended
        if one.name == names.SPAN_ROUTER_GENERATE and f"{one.context.trace_id:032x}" == trace_id
    ]
    told = dict(span.attributes or {})
    assert (told[names.ATTR_PLACEMENT], told[names.ATTR_TOKENS_CACHED_EXPECTED]) == ("cache", 80)
