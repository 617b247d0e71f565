"""Workers AI's own paths against a mesh with keys: both families, streams, batches, errors, Cloudflare's SDK."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import cloudflare
import httpx
import pytest
import pytest_asyncio

from meshfire.cluster.topology import parse
from meshfire.store.accounts import Accounts, Plan
from meshfire.store.database import Database
from tests import oracles
from tests.mesh.harness import InProcessMesh, mesh_of

KIMI = "@cf/moonshotai/kimi-k2.5"
CLASSIC = "@cf/meta/m"
SAY = {"max_tokens": 5, "temperature": 0}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Native:
    mesh: InProcessMesh
    account: str
    token: str

    @property
    def base(self) -> str:
        return f"{self.mesh.http_url}/client/v4/accounts/{self.account}/ai"

    async def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.token}"} | headers
        async with httpx.AsyncClient(timeout=40, trust_env=False) as client:
            return await client.post(f"{self.base}/{path}", json=body, headers=headers)

    async def run(self, model: str, body: object, query: str = "") -> Any:
        answer = await self.post(f"run/{model}{query}", body)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        assert (told["success"], told["errors"], told["messages"]) == (True, [], [])
        return told["result"]

    async def frames(self, model: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        answer = await self.post(f"run/{model}", body | {"stream": True})
        assert "event-stream" in answer.headers["content-type"]
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def native(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Native]:
    folder: Path = tmp_path_factory.mktemp("native")
    model = oracles.make_deepseek_checkpoint(folder / "model")
    store_url = f"sqlite:///{folder / 'store.db'}"
    database = await Database.open(store_url)
    account = await Accounts(database).create_account("one", Plan.PAID)
    _, token = await Accounts(database).create_key(account.account_id, "laptop")
    await database.close()
    topology = parse(
        {
            "mesh": "native",
            "http_port": 0,
            "keys": True,
            "store_url": store_url,
            "aliases": {KIMI: "m"},
            "models": [{"model": str(model), "name": "m", "expert_shards": 0}],
        }
    )
    async with mesh_of(topology) as mesh:
        yield Native(mesh, account.account_id, token)


async def test_the_classic_family_answers_with_a_response(native: Native) -> None:
    chat = [{"role": "user", "content": "Hello there"}]
    by_prompt = await native.run(CLASSIC, {"prompt": "Hello there", **SAY})
    by_messages = await native.run(CLASSIC, {"messages": chat, **SAY})
    assert by_prompt["response"] == by_messages["response"] != ""
    assert by_prompt["tool_calls"] == []
    assert by_prompt["usage"]["completion_tokens"] == 5
    raw = await native.run(CLASSIC, {"prompt": "Hello there", "raw": True, **SAY})
    assert raw["usage"]["prompt_tokens"] < by_prompt["usage"]["prompt_tokens"], "raw is not rendered"


async def test_a_classic_stream_has_native_frames(native: Native) -> None:
    whole = await native.run(CLASSIC, {"prompt": "Hello there", **SAY})
    *texts, last = await native.frames(CLASSIC, {"prompt": "Hello there", **SAY})
    assert "".join(frame["response"] for frame in texts) == whole["response"]
    assert last["response"] == ""
    assert {name: last["usage"][name] for name in ("prompt_tokens", "completion_tokens")} == {
        name: whole["usage"][name] for name in ("prompt_tokens", "completion_tokens")
    }


async def test_the_default_of_the_classic_family_is_256_tokens(native: Native) -> None:
    told = await native.run(CLASSIC, {"prompt": "Hello", "temperature": 1, "seed": 3})
    assert told["finish_reason"] == "stop" or told["usage"]["completion_tokens"] == 256


async def test_the_chat_family_answers_with_a_chat_completion(native: Native) -> None:
    body = {"messages": [{"role": "user", "content": "Hello there"}], **SAY}
    told = await native.run(KIMI, body)
    assert (told["object"], told["model"]) == ("chat.completion", KIMI)
    encoded = await native.run(quote(KIMI, safe=""), body)
    assert encoded["choices"] == told["choices"]
    by_prompt = await native.run(KIMI, {"prompt": "Hello there", **SAY})
    assert by_prompt["choices"][0]["message"] == told["choices"][0]["message"]
    frames = await native.frames(KIMI, body)
    text = "".join(one["choices"][0]["delta"].get("content", "") for one in frames if one["choices"])
    assert text == told["choices"][0]["message"]["content"]
    assert frames[-1]["choices"] == []
    assert frames[-1]["usage"]["completion_tokens"] == 5


async def test_the_model_may_be_in_the_body(native: Native) -> None:
    nested = await native.post("run", {"model": CLASSIC, "input": {"prompt": "Hello there", **SAY}})
    flat = await native.post("run", {"model": CLASSIC, "prompt": "Hello there", **SAY})
    assert nested.json()["result"]["response"] == flat.json()["result"]["response"] != ""
    missing = await native.post("run", {"input": {"prompt": "Hello"}})
    assert (missing.status_code, missing.json()["errors"][0]["code"]) == (400, 5006)


@pytest.mark.parametrize(
    ("model", "body", "status", "code"),
    [
        ("@cf/no/body", {"prompt": "x"}, 400, 5007),
        (CLASSIC, {"prompt": "x", "temperature": 6}, 400, 5006),
        (CLASSIC, {"prompt": "x", "messages": []}, 400, 5006),
        (CLASSIC, {}, 400, 5006),
        (CLASSIC, {"prompt": "x", "temprature": 1}, 400, 5006),
        (KIMI, {"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}, 400, 5006),
        (CLASSIC, {"prompt": "x", "lora": "mine"}, 400, 5006),
    ],
)
async def test_errors_have_the_envelope_and_the_code(
    native: Native, model: str, body: dict[str, Any], status: int, code: int
) -> None:
    answer = await native.post(f"run/{model}", body)
    told = answer.json()
    assert (answer.status_code, told["errors"][0]["code"]) == (status, code), told
    assert (told["success"], told["result"], told["messages"]) == (False, None, [])
    assert told["errors"][0]["message"].startswith("AiError: ")
    assert told["error"]["message"]


async def test_who_may_not(native: Native) -> None:
    wrong = await native.post(f"run/{CLASSIC}", {"prompt": "x"}, authorization="Bearer no")
    assert (wrong.status_code, wrong.json()["errors"][0]["code"]) == (401, 10000)
    async with httpx.AsyncClient(timeout=40, trust_env=False) as client:
        url = native.base.replace(native.account, "f" * 32)
        other = await client.post(
            f"{url}/run/{CLASSIC}", json={"prompt": "x"}, headers={"authorization": f"Bearer {native.token}"}
        )
        nowhere = await client.get(f"{native.mesh.http_url}/client/v4/nothing")
    assert (other.status_code, other.json()["errors"][0]["code"]) == (403, 3041)
    assert (nowhere.status_code, nowhere.json()["errors"][0]["code"]) == (404, 7003)


async def test_openais_paths_below_an_account(native: Native) -> None:
    body = {"model": KIMI, "messages": [{"role": "user", "content": "Hello there"}], **SAY}
    answer = await native.post("v1/chat/completions", body)
    assert answer.json()["object"] == "chat.completion", "no envelope around success"
    wrong = await native.post("v1/chat/completions", body | {"temperature": 9})
    assert (wrong.status_code, wrong.json()["errors"][0]["code"]) == (400, 5006)
    assert wrong.json()["error"]["param"] == "temperature"


async def test_a_batch_is_queued_polled_and_answered_in_order(native: Native) -> None:
    requests = [
        {"prompt": "Hello there", "external_reference": "a", **SAY},
        {"prompt": "x", "temperature": 99},
        {"messages": [{"role": "user", "content": "Hello there"}], "external_reference": "b", **SAY},
    ]
    queued = await native.run(CLASSIC, {"requests": requests}, "?queueRequest=true")
    assert queued["status"] == "queued"
    async with asyncio.timeout(40):
        while "status" in (told := await native.run(CLASSIC, {"request_id": queued["request_id"]})):
            assert told["status"] in ("queued", "running")
            await asyncio.sleep(0.1)
    first, wrong, last = told["responses"]
    assert (first["id"], first["success"], first["external_reference"]) == (0, True, "a")
    online = await native.run(CLASSIC, {"prompt": "Hello there", **SAY})
    assert first["result"]["response"] == last["result"]["response"] == online["response"]
    assert (wrong["id"], wrong["success"]) == (1, False)
    assert wrong["errors"][0]["code"] == 5006
    assert told["usage"]["completion_tokens"] == 10


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"request_id": "no-such-request"}, 404, 7003),
        ({"request_id": 7}, 400, 5006),
        ({"requests": []}, 400, 5006),
        ({"requests": [1]}, 400, 5006),
        ({"requests": [{"prompt": "x"}], "prompt": "y"}, 400, 5006),
        ({"requests": [{"prompt": "x" * (10 << 20)}]}, 400, 5006),
    ],
)
async def test_wrong_batches(native: Native, body: dict[str, Any], status: int, code: int) -> None:
    answer = await native.post(f"run/{CLASSIC}?queueRequest=true", body)
    assert (answer.status_code, answer.json()["errors"][0]["code"]) == (status, code), answer.text[:300]


async def test_the_catalogue(native: Native) -> None:
    async with httpx.AsyncClient(timeout=40, trust_env=False) as client:
        headers = {"authorization": f"Bearer {native.token}"}
        found = (await client.get(f"{native.base}/models/search?search=m&per_page=1", headers=headers)).json()
        schema = (await client.get(f"{native.base}/models/schema?model={quote(KIMI)}", headers=headers)).json()
        none = (await client.get(f"{native.base}/models/search?search=zzz", headers=headers)).json()
    assert [one["name"] for one in found["result"]] == ["m"]
    assert found["result_info"] == {"page": 1, "per_page": 1, "count": 1, "total_count": 1}
    assert "messages" in schema["result"]["input"]["properties"]
    assert none["result"] == []


async def test_cloudflares_own_sdk(native: Native) -> None:
    http_client = httpx.AsyncClient(trust_env=False)
    client = cloudflare.AsyncCloudflare(
        api_token=native.token, base_url=f"{native.mesh.http_url}/client/v4", http_client=http_client
    )
    told = await client.ai.run(CLASSIC, account_id=native.account, prompt="Hello there", max_tokens=5, temperature=0)
    assert told["response"] == (await native.run(CLASSIC, {"prompt": "Hello there", **SAY}))["response"]  # type: ignore[index]
    with pytest.raises(cloudflare.BadRequestError) as caught:
        await client.ai.run("@cf/no/body", account_id=native.account, prompt="x")
    assert caught.value.errors[0].code == 5007
    await client.close()
