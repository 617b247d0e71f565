"""Keys, neurons and the ledger through a whole mesh: what is answered, traced and recorded is the same money."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from meshfire.cluster.topology import parse
from meshfire.metering.neurons import Rate, Tokens, micro_neurons
from meshfire.store.accounts import Accounts, Plan
from meshfire.store.database import Database
from meshfire.store.ledger import GroupBy, Ledger
from meshfire.telemetry import names
from tests import oracles
from tests.mesh.harness import InProcessMesh, mesh_of

RATE = Rate(input=54545, output=272727, cached=9091)
PROMPT = "The quick brown fox jumps over the lazy dog. " * 4


@dataclass
class Keyed:
    mesh: InProcessMesh
    database: Database
    account_id: str
    token: str

    async def complete(self, token: str | None = None, **body: Any) -> httpx.Response:
        headers = {"x-api-key": self.token if token is None else token}
        asked = {"model": "m", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True} | body
        async with httpx.AsyncClient(timeout=40, trust_env=False) as client:
            return await client.post(f"{self.mesh.http_url}/v1/completions", json=asked, headers=headers)

    async def lines(self, count: int) -> int:
        """Micro-neurons of the account, once its ledger has so many lines."""
        async with asyncio.timeout(20):
            while True:
                sums = await Ledger(self.database).sums([GroupBy.ACCOUNT], account_id=self.account_id)
                if sums and sums[0].num_requests >= count:
                    assert sums[0].num_requests == count
                    return sums[0].micro_neurons
                await asyncio.sleep(0.05)

    async def traced(self) -> int:
        """What the traces say that the account owes: tokens of the spans, at the table's rate."""
        for one in self.mesh.meshes.values():
            await asyncio.to_thread(one.telemetry.flush)
        owed = 0
        for span in self.mesh.spans.ended:
            told: dict[str, Any] = dict(span.attributes or {})
            if span.name != names.SPAN_ROUTER_GENERATE or told.get(names.ATTR_ACCOUNT_ID) != self.account_id:
                continue
            tokens = Tokens(
                told[names.ATTR_TOKENS_BILLED_PROMPT],
                told[names.ATTR_TOKENS_BILLED_CACHED],
                told[names.ATTR_TOKENS_OUTPUT],
            )
            assert told[names.ATTR_MICRO_NEURONS] == micro_neurons(tokens, RATE)
            owed += micro_neurons(tokens, RATE)
        return owed


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Keyed]:
    model = oracles.make_deepseek_checkpoint(tmp_path / "model")
    prices = tmp_path / "prices.yaml"
    prices.write_text("models: {m: {input: 54545, output: 272727, cached: 9091}}")
    store_url = f"sqlite:///{tmp_path / 'store.db'}"
    database = await Database.open(store_url)
    accounts = Accounts(database)
    account = await accounts.create_account("one", Plan.PAID, requests_per_minute=12)
    _, token = await accounts.create_key(account.account_id, "laptop")
    topology = parse(
        {
            "mesh": "metered",
            "http_port": 0,
            "keys": True,
            "store_url": store_url,
            "prices": str(prices),
            "models": [{"model": str(model), "name": "m", "expert_shards": 0}],
        }
    )
    async with mesh_of(topology) as mesh:
        yield Keyed(mesh, database, account.account_id, token)
    await database.close()


async def test_answers_traces_and_ledger_tell_the_same_money(keyed: Keyed) -> None:
    first, again = await keyed.complete(), await keyed.complete()
    many = await keyed.complete(n=3, temperature=1, seed=5)
    told = 0.0
    for answer in (first, again, many):
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        assert answer.headers["cf-ai-neurons"] == f"{usage['neurons']:.2f}"
        told += usage["neurons"]
    usage = first.json()["usage"]
    tokens = Tokens(usage["prompt_tokens"], 0, usage["completion_tokens"])
    assert usage["neurons"] == pytest.approx(micro_neurons(tokens, RATE) / 1e6)
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert again.json()["usage"]["neurons"] < usage["neurons"], "cached input is cheaper"
    recorded = await keyed.lines(5)
    assert recorded == await keyed.traced()
    assert told == pytest.approx(recorded / 1e6)


async def test_a_client_that_leaves_pays_for_what_it_got(keyed: Keyed) -> None:
    headers = {"authorization": f"Bearer {keyed.token}"}
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(timeout=40, trust_env=False) as client:
        url = f"{keyed.mesh.http_url}/v1/completions"
        async with client.stream("POST", url, json=body, headers=headers) as answer:
            async for text in answer.aiter_lines():
                if text.startswith("data: {"):
                    break
    recorded = await keyed.lines(1)
    assert recorded == await keyed.traced() > 0
    (line,) = await Ledger(keyed.database).sums([GroupBy.ACCOUNT])
    assert 0 < line.tokens.output < 300


async def test_who_has_no_key_or_too_many_requests(keyed: Keyed) -> None:
    assert (await keyed.complete(token="")).status_code == 401
    assert (await keyed.complete(token="mf_guess")).json()["error"]["code"] == "invalid_api_key"
    async with httpx.AsyncClient(timeout=40, trust_env=False) as client:
        assert (await client.get(f"{keyed.mesh.http_url}/v1/models")).status_code == 401
        assert (await client.get(f"{keyed.mesh.http_url}/healthz")).status_code == 200
    statuses = [(await keyed.complete(max_tokens=1)).status_code for _ in range(26)]
    # 12 a minute: of 26 in a row at least two are refused, whatever minute border they cross
    assert set(statuses) == {200, 429}
    assert 12 <= statuses.count(200) <= 24
