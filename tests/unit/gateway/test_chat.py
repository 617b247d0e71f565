"""POST /v1/chat/completions over real HTTP against a scripted router."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from meshfire.api.common.v1 import sampling_pb2
from tests.unit.gateway.conftest import Gateway
from tests.unit.gateway.fake_router import MODEL, PROMPT_IDS, delta, finished, logprob, saying, started

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The stream's objects; it must end with [DONE], once."""
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    payloads = [frame.removeprefix("data: ") for frame in frames]
    assert payloads.index("[DONE]") == len(payloads) - 1
    return [json.loads(one) for one in payloads[:-1]]


async def test_an_answer_has_openais_shape(gateway: Gateway) -> None:
    response = await gateway.post(CHAT, BODY)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "id": "chatcmpl-r1",
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello you", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
            "neurons": 0.0,
        },
    }
    assert response.headers["cf-ai-neurons"] == "0.00"


async def test_a_stream_has_role_first_then_text_then_the_finish_reason_and_no_usage(gateway: Gateway) -> None:
    response = await gateway.post(CHAT, BODY | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    assert [one["choices"][0]["delta"] for one in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": " you"},
        {},
    ]
    assert [one["choices"][0]["finish_reason"] for one in chunks] == [None, None, None, "stop"]
    assert all("usage" not in one for one in chunks)
    assert {one["id"] for one in chunks} == {"chatcmpl-r1"}
    assert {one["object"] for one in chunks} == {"chat.completion.chunk"}


async def test_include_usage_adds_one_last_chunk_without_choices_and_equals_the_whole_answers(gateway: Gateway) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(await gateway.post(CHAT, BODY | options))
    assert chunks[-1]["choices"] == []
    assert [one["usage"] for one in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["usage"] == (await gateway.post(CHAT, BODY)).json()["usage"]


async def test_empty_deltas_are_not_sent(gateway: Gateway) -> None:
    gateway.router.behave = saying(started(), delta("", [1]), delta("é", [2]), delta("", [3]), finished(3))
    chunks = events(await gateway.post(CHAT, BODY | {"stream": True}))
    assert [one["choices"][0]["delta"].get("content") for one in chunks] == ["", "é", None]


async def test_logprobs_have_token_strings_and_bytes(gateway: Gateway) -> None:
    choice = (await gateway.post(CHAT, BODY | {"logprobs": True, "top_logprobs": 2})).json()["choices"][0]
    assert gateway.router.requests[0].sampling.num_logprobs == 2
    assert choice["logprobs"]["content"][0] == {
        "token": "Hello",
        "logprob": -0.25,
        "bytes": list(b"Hello"),
        "top_logprobs": [
            {"token": "Hello", "logprob": -0.25, "bytes": list(b"Hello")},
            {"token": "Hi", "logprob": -1.5, "bytes": list(b"Hi")},
        ],
    }
    assert len(choice["logprobs"]["content"]) == 2


async def test_a_stream_carries_logprobs_of_tokens_whose_text_is_still_held_back(gateway: Gateway) -> None:
    first, second = b"\xf0\x9f", b"\xa6\xab"
    gateway.router.behave = saying(
        started(), delta("", [1], [logprob(first)]), delta("🦫", [2], [logprob(second)]), finished(2)
    )
    chunks = events(await gateway.post(CHAT, BODY | {"stream": True, "logprobs": True}))
    tokens = [t for one in chunks for t in (one["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [t["token"] for t in tokens] == ["bytes:\\xf0\\x9f", "bytes:\\xa6\\xab"]
    assert bytes(b for t in tokens for b in t["bytes"]).decode() == "🦫"


async def test_a_probability_of_zero_is_a_number_in_json(gateway: Gateway) -> None:
    gateway.router.behave = saying(started(), delta("a", [1], [logprob(b"a", float("-inf"))]), finished(1))
    choice = (await gateway.post(CHAT, BODY | {"logprobs": True})).json()["choices"][0]
    assert choice["logprobs"]["content"][0]["logprob"] == -9999.0


async def test_return_token_ids_adds_prompt_and_output_ids_with_the_end_token(gateway: Gateway) -> None:
    choice = (await gateway.post(CHAT, BODY | {"return_token_ids": True})).json()["choices"][0]
    assert choice["prompt_token_ids"] == list(PROMPT_IDS)
    assert choice["token_ids"] == [101, 102, 2]


async def test_return_token_ids_in_a_stream_gives_the_prompt_once_and_every_id_once(gateway: Gateway) -> None:
    chunks = events(await gateway.post(CHAT, BODY | {"stream": True, "return_token_ids": True}))
    assert chunks[0]["choices"][0]["prompt_token_ids"] == list(PROMPT_IDS)
    assert all("prompt_token_ids" not in one["choices"][0] for one in chunks[1:])
    assert [i for one in chunks for i in one["choices"][0]["token_ids"]] == [101, 102, 2]


async def test_n_outputs_have_seeds_in_a_row_and_count_the_prompt_once(gateway: Gateway) -> None:
    answer = (await gateway.post(CHAT, BODY | {"n": 3, "seed": 5})).json()
    assert sorted(one.sampling.seed for one in gateway.router.requests) == [5, 6, 7]
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 9


async def test_n_streams_are_told_apart_by_index(gateway: Gateway) -> None:
    chunks = events(await gateway.post(CHAT, BODY | {"n": 2, "stream": True}))
    for index in (0, 1):
        own = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == index]
        assert "".join(one["delta"].get("content", "") for one in own) == "Hello you"
        assert own[0]["delta"]["role"] == "assistant"
        assert [one["finish_reason"] for one in own] == [None, None, None, "stop"]


async def test_length_and_a_hit_stop_text_are_reported(gateway: Gateway) -> None:
    gateway.router.behave = saying(started(), delta("a", [1]), finished(1, sampling_pb2.FINISH_REASON_LENGTH))
    assert (await gateway.post(CHAT, BODY)).json()["choices"][0]["finish_reason"] == "length"
    gateway.router.behave = saying(started(), delta("a", [1]), finished(1, stop_hit="END"))
    choice = (await gateway.post(CHAT, BODY | {"stop": "END"})).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")


async def test_line_separators_of_unicode_do_not_cut_an_event(gateway: Gateway) -> None:
    text = "a\u2028b\x85c\u2029d\ne"
    gateway.router.behave = saying(started(), delta(text, [1]), finished(1))
    response = await gateway.post(CHAT, BODY | {"stream": True})
    assert not {"\u2028", "\u2029", "\x85"} & set(response.text)
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in events(response)) == text
    assert (await gateway.post(CHAT, BODY)).json()["choices"][0]["message"]["content"] == text


async def test_cached_tokens_are_reported(gateway: Gateway) -> None:
    gateway.router.behave = saying(started(), delta("a", [1]), finished(1, num_cached=2))
    usage = (await gateway.post(CHAT, BODY)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_headers_reach_the_router_and_the_session_header_wins_over_the_body(gateway: Gateway) -> None:
    headers = {"x-meshfire-script": "e30=", "x-meshfire-fault": "decode:delay=1s", "x-session-affinity": "header"}
    await gateway.post(CHAT, BODY | {"prompt_cache_key": "body"}, headers=headers)
    assert gateway.router.metadata[0]["x-meshfire-script"] == "e30="
    assert gateway.router.metadata[0]["x-meshfire-fault"] == "decode:delay=1s"
    assert gateway.router.requests[0].session_key == "header"
    await gateway.post(CHAT, BODY | {"prompt_cache_key": "body"})
    assert gateway.router.requests[1].session_key == "body"


async def test_one_span_joins_the_callers_trace_and_is_the_routers_parent(gateway: Gateway) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    response = await gateway.post(CHAT, BODY, headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
    assert response.headers["x-meshfire-trace-id"] == trace
    assert response.headers["x-request-id"] == "r1"
    gateway.telemetry.flush()
    (span,) = gateway.spans.get_finished_spans()
    assert span.name == "gateway.request"
    assert gateway.router.metadata[0]["traceparent"] == f"00-{trace}-{span.context.span_id:016x}-01"
    assert dict(span.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "meshfire.model": MODEL,
        "meshfire.stream": False,
        "meshfire.request.id": "r1",
        "meshfire.tokens.prompt": 3,
        "meshfire.tokens.cached": 0,
        "meshfire.tokens.output": 3,
    }
