"""The test hooks through a whole mesh: scripts say what is said, faults are survived without a changed token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from meshfire.client import Message, Sampling
from meshfire.errors import BadInput, TestHooksOff
from tests import oracles
from tests.mesh.asking import ask, post, script
from tests.mesh.harness import InProcessMesh, in_process_mesh

CHAT = [Message("user", "Hi")]
GREEDY = Sampling(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[InProcessMesh]:
    kimi = oracles.make_deepseek_checkpoint(tmp_path / "model")
    async with in_process_mesh({"m": kimi}, expert_shards=2, test_hooks=True) as running:
        yield running


async def test_a_script_replaces_only_the_choice_of_tokens(mesh: InProcessMesh) -> None:
    pieces = ["Grüße", ", 世", "界 👋🏽", "!"]
    answer = await ask(mesh, CHAT, Sampling(), metadata=script(pieces=pieces, end="eos"))
    assert answer.text == "".join(pieces)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(one.text for one in answer.deltas)
    assert answer.finished.finish_reason == "stop"
    assert answer.finished.usage.num_output_tokens == len(answer.token_ids) + 1  # the end token has no text


async def test_a_script_may_end_for_its_length_and_stop_texts_still_work(mesh: InProcessMesh) -> None:
    cut = await ask(mesh, CHAT, Sampling(), metadata=script(wants="one two three", end="length"))
    assert (cut.text, cut.finished.finish_reason) == ("one two three", "length")
    stopped = await ask(mesh, CHAT, Sampling(stop=["wo th"]), metadata=script(wants="one two three"))
    assert (stopped.text, stopped.finished.stop_hit) == ("one t", "wo th")


async def test_a_script_works_over_http_and_shows_its_token_ids(mesh: InProcessMesh) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "return_token_ids": True}
    answer = await post(mesh, "/v1/chat/completions", json=body, headers=script(pieces=["ok"]))
    choice = answer.json()["choices"][0]
    assert choice["message"]["content"] == "ok"
    assert answer.json()["usage"]["completion_tokens"] == len(choice["token_ids"])


@pytest.mark.parametrize(
    "fault",
    ["kv:corrupt", "prefill:delay=200ms", "decode:delay=100ms@token=3", "expert-1:delay=200ms@layer=2"],
)
async def test_a_fault_that_kills_nobody_changes_no_token(mesh: InProcessMesh, fault: str) -> None:
    expected = await ask(mesh, CHAT, GREEDY)
    answer = await ask(mesh, CHAT, GREEDY, metadata={"x-meshfire-fault": fault})
    assert answer.token_ids == expected.token_ids
    assert (answer.finished.receipt.num_failovers > 0) == (fault == "kv:corrupt")


async def test_malformed_hooks_name_their_header(mesh: InProcessMesh) -> None:
    for metadata in ({"x-meshfire-script": "%%%"}, {"x-meshfire-fault": "decode:explode"}):
        with pytest.raises(BadInput) as caught:
            await ask(mesh, CHAT, GREEDY, metadata=metadata)
        assert caught.value.field == next(iter(metadata))


async def test_hooks_are_refused_where_they_are_off(tmp_path: Path) -> None:
    llama = oracles.make_llama_checkpoint(tmp_path / "model")
    async with in_process_mesh({"m": llama}, expert_shards=0) as mesh:
        for metadata in (script(pieces=["x"]), {"x-meshfire-fault": "decode:kill"}):
            with pytest.raises(TestHooksOff):
                await ask(mesh, CHAT, GREEDY, metadata=metadata)
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
        answer = await post(mesh, "/v1/chat/completions", json=body, headers=script(pieces=["x"]))
        assert answer.status_code == 403
