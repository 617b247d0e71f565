"""Troubles with text that users of other engines reported, through the whole mesh and the way OpenAI's clients see it.

Tool calls and reasoning are in `test_tool_calls`, schemas in `test_structured_output`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from meshfire.client import Message, Sampling
from tests.made_kimi import make_kimi
from tests.mesh.asking import ask, post, script
from tests.mesh.harness import InProcessMesh, in_process_mesh

USER = {"role": "user", "content": "Beaver?"}
INSTANT = {"chat_template_kwargs": {"thinking": False}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_kimi(tmp_path_factory.mktemp("kimi") / "model")


@pytest.fixture
async def mesh(directory: Path) -> AsyncIterator[InProcessMesh]:
    async with in_process_mesh({"m": directory}, test_hooks=True, expert_shards=0) as mesh:
        yield mesh


@dataclass
class Streamed:
    """What a stream said, and its events as they came."""

    events: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None

    @property
    def deltas(self) -> list[str]:
        return [
            one["delta"]["content"] for event in self.events for one in event["choices"] if one["delta"].get("content")
        ]


async def stream(mesh: InProcessMesh, headers: dict[str, str] | None = None, **body: Any) -> Streamed:
    """A chat, streamed; every event is JSON, the last one is [DONE]."""
    seen = Streamed()
    async with httpx.AsyncClient(timeout=40, trust_env=False) as client:
        request = {"model": "m", "messages": [USER], "stream": True} | body
        async with client.stream(
            "POST", f"{mesh.http_url}/v1/chat/completions", json=request, headers=headers
        ) as answer:
            assert answer.status_code == 200, await answer.aread()
            lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    seen.events = [json.loads(line) for line in lines]
    seen.text = "".join(seen.deltas)
    for event in seen.events:
        for one in event["choices"]:
            seen.finish_reason = one["finish_reason"] or seen.finish_reason
    return seen


async def whole(mesh: InProcessMesh, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    """The same, not streamed."""
    answer = await post(
        mesh, "/v1/chat/completions", json={"model": "m", "messages": [USER]} | body, headers=headers or {}
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_characters_whose_bytes_are_spread_over_tokens(mesh: InProcessMesh) -> None:
    """Every way to cut a text of emoji, a joined family and Chinese into steps of one to three bytes."""
    text = "Ok 🦫 潮 👩‍🌾!"
    data = text.encode()
    reported = ["4f6b20", "f09f", "a6ab", "20e6", "bd", "ae20", "f09f91a9e280", "8df09f8cbe", "21"]
    cuts = [[data[at : at + size].hex() for at in range(0, len(data), size)] for size in (1, 2, 3)]
    for pieces in [reported, *cuts]:
        headers = script(pieces_hex=pieces, end="eos")
        seen = await stream(mesh, headers, **INSTANT)
        assert seen.text == text
        assert not any("\N{REPLACEMENT CHARACTER}" in one for one in seen.deltas)
        assert (await whole(mesh, headers, **INSTANT))["choices"][0]["message"]["content"] == text


async def test_a_character_that_max_tokens_cuts_is_dropped_in_both_modes(mesh: InProcessMesh) -> None:
    headers = script(pieces_hex=["4f6b20", "f09f"], end="length")
    counted = (await whole(mesh, headers, **INSTANT))["usage"]["completion_tokens"]
    longer = script(pieces_hex=["4f6b20", "f09f", "a6ab", "21"], end="eos")
    seen = await stream(mesh, longer, max_tokens=counted, **INSTANT)
    answer = (await whole(mesh, longer, max_tokens=counted, **INSTANT))["choices"][0]
    assert (seen.text, seen.finish_reason) == ("Ok ", "length")
    assert (answer["message"]["content"], answer["finish_reason"]) == ("Ok ", "length")


@pytest.mark.parametrize(
    ("pieces", "end", "content", "tail", "finish_reason"),
    [
        (["Tally: ", "RED", "-", "FLA", "G9", " more"], "eos", "Tally: ", 0, "stop"),
        (["Tally: ", "RED", "-", "FLA", "X"], "eos", "Tally: RED-FLAX", None, "stop"),
        (["Tally: ", "RED", "-FLA"], "length", "Tally: RED-FLA", None, "length"),
        (["a", "\n", "\nEN", "D tail"], "eos", "a", len(" tail"), "stop"),
        (["RED-RED-FL", "AG9"], "eos", "RED-", 0, "stop"),
        (["\n\n", "\nEND"], "eos", "\n", 0, "stop"),
    ],
)
async def test_stop_texts_over_several_tokens(
    mesh: InProcessMesh, pieces: list[str], end: str, content: str, tail: int | None, finish_reason: str
) -> None:
    stops = ["RED-FLAG9", "\n\nEND"]
    headers = script(pieces=pieces, end=end)
    seen = await stream(mesh, headers, stop=stops, **INSTANT)
    answer = await whole(mesh, headers, stop=stops, **INSTANT)
    assert (seen.text, seen.finish_reason) == (content, finish_reason)
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (content, finish_reason)
    if tail is not None:  # nothing counts after the token that completed the stop text
        without = script(pieces=[one for one in pieces if one != " more"], end="length")
        counted = (await whole(mesh, without, **INSTANT))["usage"]["completion_tokens"]
        assert answer["usage"]["completion_tokens"] <= counted - tail


MESSAGES: list[tuple[dict[str, Any], int, str | None]] = [
    ({"messages": []}, 400, "messages"),
    ({}, 400, "messages"),
    ({"messages": [], "stream": True}, 400, "messages"),
    ({"messages": [{"role": "user", "content": ""}]}, 200, None),
    ({"messages": [{"role": "user", "content": []}]}, 200, None),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, 400, "messages[0].role"),
    ({"messages": "hi"}, 400, "messages"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": None}]}, 200, None),
    ({"messages": [None]}, 400, "messages[0]"),
]


async def test_messages_that_are_empty_or_none(mesh: InProcessMesh) -> None:
    for body, status, param in MESSAGES * 2:  # the same on every run
        answer = await post(mesh, "/v1/chat/completions", json={"model": "m", "max_tokens": 4} | body)
        assert answer.status_code == status, (body, answer.text)
        if status == 400:
            error = answer.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", param)
            assert error["message"]


BIASES: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": {"999999999": -100}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"anchor": -100}}, "logit_bias"),
    ({"logit_bias": {"42": 1000}}, "logit_bias"),
    ({"stop_token_ids": [999999999]}, "stop_token_ids[0]"),
]


async def test_token_ids_outside_the_vocabulary_harm_no_neighbour(mesh: InProcessMesh) -> None:
    prompts = [[Message("user", f"Count to {index}.")] for index in range(4)]
    greedy = Sampling(max_tokens=60, temperature=0, ignore_eos=True)
    expected = [(await ask(mesh, prompt, greedy)).token_ids for prompt in prompts]
    around = [asyncio.create_task(ask(mesh, prompt, greedy)) for prompt in prompts]
    for body, param in BIASES:
        answer = await post(
            mesh, "/v1/chat/completions", json={"model": "m", "max_tokens": 4, "messages": [USER]} | body
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (await whole(mesh, max_tokens=4))["choices"]
    answers = [await one for one in around]
    assert [one.token_ids for one in answers] == expected
    assert all(one.finished.receipt.num_failovers == 0 for one in answers)


async def test_usage_comes_once_and_only_where_it_is_wanted(mesh: InProcessMesh) -> None:
    asked = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    seen = await stream(mesh, stream_options={"include_usage": True}, **asked)
    with_usage = [index for index, event in enumerate(seen.events) if event.get("usage")]
    assert with_usage == [len(seen.events) - 1]
    assert seen.events[-1]["choices"] == []
    assert seen.events[-2]["choices"][0]["finish_reason"] == "length"
    assert seen.events[0]["choices"][0]["delta"]["role"] == "assistant"
    usage, alone = seen.events[-1]["usage"], (await whole(mesh, **asked))["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [usage[one] for one in counts] == [alone[one] for one in counts]
    for options in ({}, {"stream_options": {"include_usage": False}}):
        plain = await stream(mesh, **asked, **options)
        assert all(not event.get("usage") and event["choices"] for event in plain.events)
    refused = await post(
        mesh,
        "/v1/chat/completions",
        json={"model": "m", "messages": [USER], "stream": False, "stream_options": {"include_usage": True}},
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream_options")


async def test_large_requests_are_answered_or_refused_at_the_door(mesh: InProcessMesh) -> None:
    """Several times gRPC's usual limit of 4 MiB; what is too long is said in the caller's words."""
    for size in (3_000_000, 9_000_000):
        body = {"model": "m", "messages": [{"role": "user", "content": "word " * (size // 5)}], "max_tokens": 1}
        answer = await post(mesh, "/v1/chat/completions", json=body)
        assert answer.status_code in (400, 413), answer.text[:300]
        assert answer.json()["error"]["code"] in ("context_length_exceeded", "request_too_large")
    schema = {"enum": ["x" * 100] * 40_000}
    body = {"model": "m", "messages": [USER], "guided_json": schema}
    answer = await post(mesh, "/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_json")
    told = await whole(mesh, max_tokens=300, ignore_eos=True, logprobs=True, top_logprobs=20)
    logprobs = told["choices"][0]["logprobs"]["content"]
    assert len(logprobs) == 300
    assert all(len(one["top_logprobs"]) == 20 for one in logprobs)
