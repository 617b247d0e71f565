"""The trace viewer's page over stored traces."""

from __future__ import annotations

from pathlib import Path

import httpx

from meshfire.cli.viewer import page
from meshfire.telemetry.record import SpanRecord
from meshfire.telemetry.store import TraceWriter

TRACE = "ab" * 16


def span(name: str) -> SpanRecord:
    return SpanRecord(TRACE, "01" * 8, "", "router", "router-0", name, start_ns=1, end_ns=5_000_001)


async def get(folder: Path, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(app=page(folder))
    async with httpx.AsyncClient(transport=transport, base_url="http://viewer") as client:
        return await client.get(path)


async def test_the_page_lists_traces_and_draws_one(tmp_path: Path) -> None:
    TraceWriter(tmp_path).add([span("<b>router.generate")])
    listing = await get(tmp_path, "/")
    assert TRACE in listing.text
    assert "&lt;b&gt;router.generate" in listing.text
    assert "<b>router" not in listing.text
    drawn = await get(tmp_path, f"/{TRACE[:8]}")
    assert drawn.status_code == 200
    assert "router-0" in drawn.text


async def test_an_unknown_trace_is_not_found(tmp_path: Path) -> None:
    assert (await get(tmp_path, "/" + "cd" * 16)).status_code == 404
    assert "no traces yet" in (await get(tmp_path, "/")).text
