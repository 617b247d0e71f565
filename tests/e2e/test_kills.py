"""Killing any one worker in the middle of an answer: the same answer, or a clear error; never a hang."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshfire.client import Delta, Finished, MeshfireClient, Message, OutputRule, RegexRule, Sampling
from tests.e2e.mesh_process import HOP_TRANSPORTS, MeshProcess, cached_model, start_mesh

VICTIMS = ["decode-0", "expert-0", "expert-1", "prefill-0", "tokenizer-0"]
CHAT = [Message("user", "Tell me a short story about a fox.")]
GREEDY = Sampling(max_tokens=40, temperature=0)


@pytest.fixture(scope="module", params=HOP_TRANSPORTS)
def own_mesh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """A mesh of its own, for each way to its shards: what others ask must not meet a killed worker."""
    smollm2 = cached_model("smollm2-135m-instruct")
    model = {"model": str(smollm2), "prefill": 2, "decode": 1, "expert_shards": 2, "dense_slices": 2}
    topology = {"mesh": "kills", "http_port": 0, "models": [model]}
    with start_mesh(topology, tmp_path_factory.mktemp("kills"), HOP_TRANSPORTS[request.param]) as running:
        yield running


FOX = r"The fox is called [A-Z][a-z]{2,12}\. It is (red|grey|white) and ([1-9]|1[0-4]) years old\."


async def tell(
    mesh: MeshProcess, kill: tuple[str, int] | None = None, rule: OutputRule | None = None
) -> tuple[str, Finished | None]:
    """The whole answer; `kill` = (process, after how many tokens)."""
    text, tokens, finished = "", 0, None
    async with MeshfireClient(mesh.grpc_address) as client:
        async for event in client.generate(mesh.model, CHAT, GREEDY, rule=rule, timeout_s=90):
            if isinstance(event, Delta):
                text += event.text
                tokens += len(event.token_ids)
                if kill and tokens >= kill[1]:
                    mesh.kill(kill[0])
                    kill = None
            elif isinstance(event, Finished):
                finished = event
    return text, finished


@pytest.mark.timeout(240)
async def test_a_killed_worker_costs_a_pause_and_no_token(own_mesh: MeshProcess) -> None:
    expected, _ = await tell(own_mesh)
    for victim in VICTIMS:
        text, finished = await tell(own_mesh, kill=(victim, 9))
        assert text == expected, victim
        assert finished is not None, victim
        own_mesh.wait_serving(restarted=victim)


@pytest.mark.timeout(120)
async def test_a_killed_decode_worker_changes_nothing_of_a_constrained_answer(own_mesh: MeshProcess) -> None:
    rule = OutputRule(RegexRule(FOX))
    expected, _ = await tell(own_mesh, rule=rule)
    text, finished = await tell(own_mesh, kill=("decode-0", 8), rule=rule)
    assert text == expected
    assert finished is not None
    assert finished.receipt.num_failovers
    assert re.fullmatch(FOX, text)
    own_mesh.wait_serving(restarted="decode-0")


@pytest.mark.timeout(120)
def test_up_without_an_agent_says_so_serves_and_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C is SIGINT to the supervisor alone."""
    model = {"model": str(cached_model("smollm2-135m-instruct")), "expert_shards": 0}
    topology = {"mesh": "brief", "http_port": 0, "models": [model]}
    with start_mesh(topology, tmp_path, {"MESHFIRE_CONSUL_BIN": str(tmp_path / "none")}) as mesh:
        assert "discovery: files (no Consul agent found" in mesh.output.read_text()
        assert "Paris" in mesh.cli("chat", "What is the capital of France?", "--temperature", "0").stdout
        pids = [one["pid"] for one in mesh.status()["processes"]]
        assert all(pids)
        mesh.process.send_signal(signal.SIGINT)
        assert mesh.process.wait(60) == 0
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
