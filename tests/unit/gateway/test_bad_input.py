"""Whatever is wrong with a request is a 4xx in OpenAI's shape that names the field, and never reaches the router."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.unit.gateway.conftest import Gateway
from tests.unit.gateway.fake_router import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,@@secret@@"}}


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    found: dict[str, Any] = body["error"]
    return found


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"model": None}, "model", "invalid_type"),
        ({"model": 7}, "model", "invalid_type"),
        ({"model": ""}, "model", "invalid_value"),
        ({"model": "m" * 257}, "model", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": None}, "messages", "invalid_type"),
        ({"messages": "Hi"}, "messages", "invalid_type"),
        ({"messages": [USER, 5]}, "messages[1]", "invalid_type"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
        ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content", "invalid_type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", None),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]", "invalid_type"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0].content[0].type", None),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}]},
            "messages[0].content[1].image_url",
            "unsupported_value",
        ),
        ({"messages": [{**USER, "colour": "red"}]}, "messages[0].colour", "unknown_parameter"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "unsupported_value"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "c"}]}]},
            "messages[1].tool_calls[0].function",
            "missing_required_parameter",
        ),
        ({"temperature": "0.5"}, "temperature", "invalid_type"),
        ({"temperature": -0.1}, "temperature", "invalid_value"),
        ({"temperature": 5.1}, "temperature", "invalid_value"),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"top_p": 1.5}, "top_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 2.5}, "max_tokens", "invalid_type"),
        ({"max_tokens": 10**12}, "max_tokens", "invalid_value"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", None),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 129}, "n", "invalid_value"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"logit_bias": {"anchor": 1}}, "logit_bias", None),
        ({"logit_bias": {"-1": 1}}, "logit_bias", None),
        ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
        ({"logit_bias": [5]}, "logit_bias", "invalid_type"),
        ({"stop": 5}, "stop", "invalid_type"),
        ({"stop": [""]}, "stop[0]", None),
        ({"stop": ["a"] * 17}, "stop", None),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", None),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"logprobs": 1}, "logprobs", "invalid_type"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
        ({"thinking": {"type": "maybe"}}, "thinking.type", "invalid_value"),
        ({"tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "missing_required_parameter"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice", "invalid_value"),
        ({"tool_choice": 5}, "tool_choice", None),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools.tools",
            "invalid_value",
        ),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "invalid_type"),
        ({"response_format": "json"}, "response_format", None),
        ({"response_format": {"type": "yaml"}}, "response_format", "invalid_value"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "invalid_value"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}},
            "response_format",
            "invalid_type",
        ),
        ({"guided_regex": 5}, "guided_regex", "invalid_type"),
        ({"guided_choice": []}, "guided_choice", "invalid_value"),
        ({"guided_json": 5}, "guided_json", "invalid_type"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "invalid_value"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice", "invalid_value"),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "invalid_type"),
        ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
        ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
        ({"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
        ({"service_tier": "flex"}, "service_tier", "unsupported_parameter"),
        ({"echo": True}, "echo", "unsupported_parameter"),
        ({"temperatur": 1}, "temperatur", "unknown_parameter"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_type"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_wrong_chat_field_is_named(
    gateway: Gateway, change: dict[str, Any], param: str, code: str | None, stream: bool
) -> None:
    response = await gateway.post(
        CHAT, {"model": MODEL, "messages": [USER], **({"stream": True} if stream else {})} | change
    )
    if "stream_options" in change and stream and "stream" not in change:
        assert response.status_code == 200
        return
    error = error_of(response)
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert code is None or error["code"] == code
    assert param in error["message"]
    assert "secret" not in error["message"]
    assert gateway.router.requests == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "url",
    [
        {"url": "data:image/png;base64,@@not-base64@@"},
        {"url": "data:image/jpeg;base64,/9j/4AAQSkZJRg"},
        {"url": "data:image/png;base64,"},
        {"url": "data:text/plain;base64,aGVsbG8="},
        {"url": "http://169.254.169.254/latest/x.png"},
        "iVBORw0KGgoA",
    ],
)
async def test_images_are_refused_whatever_is_in_them(gateway: Gateway, url: Any, stream: bool) -> None:
    """Nothing is decoded or fetched, and nothing of it is repeated."""
    parts = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": url}]
    response = await gateway.post(
        CHAT, {"model": MODEL, "messages": [{"role": "user", "content": parts}], "stream": stream}
    )
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, "messages[0].content[1].image_url")
    assert "base64" not in error["message"]
    assert "169.254" not in error["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, 2**31]}, "prompt[1]"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [[1], [1, None]]}, "prompt[1][1]"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"n": 100, "prompt": ["a", "b"]}, "prompt"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"echo": "yes"}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"messages": []}, "messages"),
    ],
)
async def test_a_wrong_completion_field_is_named(gateway: Gateway, change: dict[str, Any], param: str) -> None:
    response = await gateway.post(COMPLETIONS, {"model": MODEL, "prompt": "a"} | change)
    error = error_of(response)
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert gateway.router.requests == []


async def test_what_asks_for_nothing_is_accepted(gateway: Gateway) -> None:
    nothing = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "functions": None,
        "modalities": ["text"],
        "service_tier": "auto",
        "echo": False,
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "stop": [],
        "temperature": None,
    }
    assert (await gateway.post(CHAT, {"model": MODEL, "messages": [USER]} | nothing)).status_code == 200


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b'{"model": NaN}', 400, "invalid_json"),
        (b'{"a": "\\ud800"}', 400, "invalid_json"),
        (b"\xff\xfe", 400, "invalid_json"),
        (b"[" * 50_000, 400, "invalid_json"),
        (b"[]", 400, "invalid_type"),
        (b"null", 400, "invalid_type"),
        (b'"text"', 400, "invalid_type"),
    ],
)
async def test_broken_json_is_400(gateway: Gateway, content: bytes, status: int, code: str) -> None:
    response = await gateway.client.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert (response.status_code, error_of(response)["code"]) == (status, code)


async def test_a_number_beyond_floats_is_400(gateway: Gateway) -> None:
    kwargs = b'{"model":"m","messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":1e999}}'
    for content, param in ((kwargs, "chat_template_kwargs"), (b'{"model":"m","temperature":1e999}', "temperature")):
        response = await gateway.client.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert error_of(response)["param"] in (param, "messages")


async def test_another_content_type_is_415(gateway: Gateway) -> None:
    response = await gateway.client.post(CHAT, content=b"{}", headers={"content-type": "text/plain"})
    assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_media_type")
    for fine in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
        response = await gateway.client.post(CHAT, content=b"{}", headers={"content-type": fine})
        assert response.status_code == 400


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_413_with_and_without_a_length(gateway: Gateway, chunked: bool) -> None:
    content = b" " * 3_000_000

    async def pieces() -> Any:
        yield content

    response = await gateway.client.post(
        CHAT, content=pieces() if chunked else content, headers={"content-type": "application/json"}
    )
    assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")
    assert (await gateway.post(CHAT, {"model": MODEL, "messages": [USER]})).status_code == 200


async def test_a_body_at_the_limit_is_read(gateway: Gateway) -> None:
    text = "x" * 199_000
    response = await gateway.post(CHAT, {"model": MODEL, "messages": [{"role": "user", "content": text}]})
    assert response.status_code == 200
    assert gateway.router.requests[0].chat.messages[0].content == text


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/v1/nothing", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("POST", CHAT + "/", 404, "not_found"),
    ],
)
async def test_unknown_paths_and_methods_are_told_in_json(
    gateway: Gateway, method: str, path: str, status: int, code: str
) -> None:
    response = await gateway.client.request(method, path)
    assert (response.status_code, error_of(response)["code"]) == (status, code)


async def test_a_long_script_reaches_the_router_and_one_beyond_metadata_is_400(gateway: Gateway) -> None:
    body = {"model": MODEL, "messages": [USER]}
    assert (await gateway.post(CHAT, body, headers={"x-meshfire-script": "A" * 200_000})).status_code == 200
    assert gateway.router.metadata[0]["x-meshfire-script"] == "A" * 200_000
    response = await gateway.post(CHAT, body, headers={"x-meshfire-script": "A" * 260_000})
    assert (response.status_code, error_of(response)["param"]) == (400, "x-meshfire-script")


async def test_a_header_that_metadata_cannot_carry_is_400(gateway: Gateway) -> None:
    response = await gateway.client.post(
        CHAT,
        json={"model": MODEL, "messages": [USER]},
        headers=[(b"x-meshfire-fault", b"d\xe9code")],
    )
    assert (response.status_code, error_of(response)["param"]) == (400, "x-meshfire-fault")
