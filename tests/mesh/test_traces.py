"""One request is one trace over every process, and its edges are those of `tests/edges.py`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan

from meshfire.telemetry import names
from tests import edges, oracles
from tests.mesh.asking import script
from tests.mesh.harness import InProcessMesh, in_process_mesh

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def kimi(tmp_path: Path) -> Path:
    return oracles.make_deepseek_checkpoint(tmp_path / "model")


async def chat(mesh: InProcessMesh, **fields: Any) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, **fields}
    headers = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
    async with httpx.AsyncClient(timeout=30) as client:
        return await client.post(f"{mesh.http_url}/v1/chat/completions", json=body, headers=headers)


async def test_a_span_counts_the_end_token_as_usage_does(kimi: Path) -> None:
    async with in_process_mesh({"m": kimi}, expert_shards=1, test_hooks=True) as mesh:
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
            url = f"{mesh.http_url}/v1/chat/completions"
            usage = (await client.post(url, json=body, headers=script(pieces=["a", "b"]))).json()["usage"]
        by_name = {one.name: dict(one.attributes or {}) for one in await spans_of(mesh)}
    assert by_name[names.SPAN_ROUTER_GENERATE][names.ATTR_TOKENS_OUTPUT] == usage["completion_tokens"] == 3


async def spans_of(mesh: InProcessMesh) -> list[ReadableSpan]:
    """All that have ended a moment after the answer, from every service."""
    await asyncio.sleep(0.5)
    for one in mesh.meshes.values():
        await asyncio.to_thread(one.telemetry.flush)
    return mesh.spans.ended


def service_of(span: ReadableSpan) -> str:
    return str(span.resource.attributes[names.ATTR_SERVICE_NAME])


def crossings(spans: list[ReadableSpan]) -> dict[tuple[str, str], set[tuple[str, str]]]:
    """Parent → child, where they belong to different services."""
    by_id = {one.context.span_id: one for one in spans}
    found: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for one in spans:
        parent = by_id.get(one.parent.span_id) if one.parent else None
        if parent is not None and service_of(parent) != service_of(one):
            found.setdefault((service_of(parent), parent.name), set()).add((service_of(one), one.name))
    return found


async def test_one_trace_spans_all_services_along_the_declared_edges(kimi: Path) -> None:
    async with in_process_mesh({"m": kimi}, expert_shards=2, dense_slices=2) as mesh:
        answer = await chat(mesh, temperature=0)
        assert answer.status_code == 200, answer.text
        spans = await spans_of(mesh)
    of_trace = [one for one in spans if f"{one.context.trace_id:032x}" == TRACE_ID]
    assert of_trace == spans, "every span of the request is in the caller's trace"
    assert answer.headers["x-meshfire-trace-id"] == TRACE_ID
    assert {service_of(one) for one in spans} == set(edges.SERVICES)
    assert crossings(spans) == edges.EDGES
    shards = {str(one.attributes[names.ATTR_SHARD_ID]) for one in spans if one.name == names.SPAN_EXPERT_FORWARD}
    assert shards == {"expert-0", "expert-1"}


async def test_spans_carry_token_counts_queue_wait_and_kv_bytes(kimi: Path) -> None:
    async with in_process_mesh({"m": kimi}, expert_shards=2) as mesh:
        usage = (await chat(mesh, temperature=0, ignore_eos=True)).json()["usage"]
        by_name = {one.name: dict(one.attributes or {}) for one in await spans_of(mesh)}
    router = by_name[names.SPAN_ROUTER_GENERATE]
    assert router[names.ATTR_TOKENS_PROMPT] == usage["prompt_tokens"]
    assert router[names.ATTR_TOKENS_OUTPUT] == usage["completion_tokens"] == 5
    assert by_name[names.SPAN_ROUTER_QUEUE_PREFILL][names.ATTR_QUEUE_WAIT_MS] >= 0
    layers, width, float_bytes, block_tokens = 3, 32 + 8, 4, 16
    num_blocks = -(-usage["prompt_tokens"] // block_tokens)
    assert by_name[names.SPAN_DECODE_READ_KV][names.ATTR_KV_BYTES] == (
        num_blocks * block_tokens * layers * width * float_bytes
    )
    forward = by_name[names.SPAN_EXPERT_FORWARD]
    assert forward[names.ATTR_EXPERT_HOPS] > 0
    assert forward[names.ATTR_EXPERT_TOKENS] > 0
