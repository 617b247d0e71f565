"""OpenAI's batches with its own SDK against a mesh: files in, jobs on idle credit, files out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from meshfire.cluster.topology import parse
from meshfire.store.accounts import Accounts, Plan
from meshfire.store.database import Database
from tests import oracles
from tests.mesh.harness import InProcessMesh, mesh_of

ENDPOINT = "/v1/completions"


class Batches:
    """A mesh with keys, and two accounts' clients."""

    def __init__(self, mesh: InProcessMesh, tokens: list[str]) -> None:
        self.mesh = mesh
        self.mine, self.other = (
            openai.AsyncOpenAI(
                base_url=f"{mesh.http_url}/v1", api_key=token, http_client=httpx.AsyncClient(trust_env=False)
            )
            for token in tokens
        )

    async def upload(self, *lines: object) -> str:
        content = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
        return (await self.mine.files.create(file=("in.jsonl", content), purpose="batch")).id

    async def run(self, *lines: object, endpoint: str = ENDPOINT, **more: Any) -> Any:
        file_id = await self.upload(*lines)
        batch = await self.mine.batches.create(
            input_file_id=file_id,
            endpoint=endpoint,  # type: ignore[arg-type]
            completion_window="24h",
            **more,
        )
        async with asyncio.timeout(40):
            while batch.status == "in_progress":
                await asyncio.sleep(0.1)
                batch = await self.mine.batches.retrieve(batch.id)
        return batch

    async def lines_of(self, file_id: str | None) -> dict[str, Any]:
        assert file_id is not None
        content = await self.mine.files.content(file_id)
        return {line["custom_id"]: line for line in map(json.loads, content.text.splitlines())}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def batches(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Batches]:
    folder: Path = tmp_path_factory.mktemp("batches")
    model = oracles.make_deepseek_checkpoint(folder / "model")
    store_url = f"sqlite:///{folder / 'store.db'}"
    database = await Database.open(store_url)
    accounts, tokens = Accounts(database), []
    for name in ("mine", "other"):
        account = await accounts.create_account(name, Plan.PAID)
        tokens.append((await accounts.create_key(account.account_id, name))[1])
    await database.close()
    topology = parse(
        {
            "mesh": "batches",
            "http_port": 0,
            "keys": True,
            "store_url": store_url,
            "models": [{"model": str(model), "name": "m", "expert_shards": 0}],
        }
    )
    async with mesh_of(topology) as mesh:
        made = Batches(mesh, tokens)
        yield made
        await made.mine.close()
        await made.other.close()


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    asked = {"model": "m", "prompt": "The quick brown fox", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": asked | body}


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_batch_answers_as_online_requests_do(batches: Batches) -> None:
    batch = await batches.run(line("one"), line("two", n=2, temperature=1, seed=3), metadata={"for": "me"})
    assert (batch.status, batch.error_file_id, batch.metadata) == ("completed", None, {"for": "me"})
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (2, 2, 0)
    answers = await batches.lines_of(batch.output_file_id)
    for custom_id, more in (("one", {}), ("two", {"n": 2, "temperature": 1, "seed": 3})):
        asked = line(custom_id, **more)["body"]
        online = await batches.mine.completions.create(
            **{key: asked[key] for key in asked if key != "ignore_eos"}, extra_body={"ignore_eos": True}
        )
        response = answers[custom_id]["response"]
        assert response["status_code"] == 200
        assert [one["text"] for one in response["body"]["choices"]] == [one.text for one in online.choices]
        assert response["body"]["usage"]["completion_tokens"] == online.usage.completion_tokens  # type: ignore[union-attr]


async def test_a_line_that_is_wrong_fails_alone(batches: Batches) -> None:
    batch = await batches.run(
        line("good"),
        b"{not json",
        line("hot", temperature=99),
        {**line("elsewhere"), "url": "/v1/chat/completions"},
        line("other model", model="nobody"),
        line("streaming", stream=True),
        line("too long", prompt=[5] * 5000),
    )
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, 6)
    assert set(await batches.lines_of(batch.output_file_id)) == {"good"}
    errors = await batches.lines_of(batch.error_file_id)
    assert set(errors) == {"line-2", "hot", "elsewhere", "other model", "streaming", "too long"}
    told = {name: one["response"]["body"]["error"] for name, one in errors.items()}
    assert all(one["response"]["status_code"] == 400 for one in errors.values())
    assert told["hot"]["param"] == "temperature"
    assert told["too long"]["code"] == "context_length_exceeded"
    assert told["line-2"]["message"].startswith("line 2 is not valid JSON")


async def test_a_cancelled_batch(batches: Batches) -> None:
    file_id = await batches.upload(*(line(f"r{number}", max_tokens=400) for number in range(60)))
    batch = await batches.mine.batches.create(
        input_file_id=file_id,
        endpoint=ENDPOINT,
        completion_window="24h",
    )
    cancelled = await batches.mine.batches.cancel(batch.id)
    assert cancelled.status == "cancelled"
    assert cancelled.cancelled_at is not None
    errors = await batches.lines_of(cancelled.error_file_id)
    assert {one["error"]["code"] for one in errors.values()} == {"batch_cancelled"}
    assert len(errors) + cancelled.request_counts.completed == 60  # type: ignore[union-attr]


async def test_files_and_batches_are_their_accounts_own(batches: Batches) -> None:
    batch = await batches.run(line("one"))
    listed = [one.id async for one in batches.mine.batches.list(limit=1)]
    assert batch.id in listed
    assert [one.id async for one in batches.other.batches.list()] == []
    assert batch.input_file_id in [one.id async for one in batches.mine.files.list()]
    calls = [
        batches.other.batches.retrieve(batch.id),
        batches.other.batches.cancel(batch.id),
        batches.other.files.retrieve(batch.input_file_id),
        batches.other.files.content(batch.input_file_id),
        batches.other.files.content(batch.output_file_id),
        batches.other.files.delete(batch.input_file_id),
        batches.mine.batches.retrieve("batch_nothing"),
        batches.mine.files.retrieve("file-out-nothing"),
    ]
    for call in calls:
        with pytest.raises(openai.NotFoundError):
            await call
    assert (await batches.mine.files.delete(batch.input_file_id)).deleted


async def test_what_is_refused_as_a_whole(batches: Batches) -> None:
    same = await batches.upload(line("a"), line("b"), line("a"))
    none = await batches.upload(b"\n\n")
    good = await batches.upload(line("a"))
    cases = [
        ({"input_file_id": same, "endpoint": ENDPOINT}, "input_file_id"),
        ({"input_file_id": none, "endpoint": ENDPOINT}, "input_file_id"),
        ({"input_file_id": good, "endpoint": "/v1/embeddings"}, "endpoint"),
        ({"input_file_id": good, "endpoint": ENDPOINT, "completion_window": "1h"}, "completion_window"),
    ]
    for wrong, param in cases:
        with pytest.raises(openai.BadRequestError) as caught:
            await batches.mine.batches.create(**({"completion_window": "24h"} | wrong))  # type: ignore[arg-type]
        assert caught.value.param == param
    with pytest.raises(openai.BadRequestError) as caught:
        await batches.mine.files.create(file=("x.jsonl", b"{}"), purpose="vision")
    assert caught.value.param == "purpose"
    with pytest.raises(openai.APIStatusError) as too_large:
        await batches.mine.files.create(file=("x.jsonl", b"x" * (11 << 20)), purpose="batch")
    assert too_large.value.status_code == 413
