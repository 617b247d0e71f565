"""The unmodified OpenAI SDK against a running mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import openai
import pytest

PROMPT = "The capital of France is"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}

pytestmark = pytest.mark.timeout(180)


class Mesh(Protocol):
    """What these tests need of the fixture `mesh`."""

    @property
    def http_url(self) -> str: ...

    @property
    def model(self) -> str: ...


@pytest.fixture(scope="module")
def client(mesh: Mesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.http_url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def model(mesh: Mesh) -> str:
    return mesh.model


def test_a_chat_is_answered_and_counted(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=QUESTION, **GREEDY)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 1 <= answer.usage.completion_tokens <= 8


def test_a_streamed_chat_equals_the_whole_one_and_ends_with_usage(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=QUESTION, **GREEDY)
    stream = client.chat.completions.create(
        model=model, messages=QUESTION, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(one.usage is None for one in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_seed_gives_the_same_text_again_and_n_outputs(client: openai.OpenAI, model: str) -> None:
    def sampled() -> list[str | None]:
        answer = client.chat.completions.create(
            model=model, messages=QUESTION, temperature=1.2, seed=7, n=2, max_tokens=8
        )
        return [choice.message.content for choice in answer.choices]

    first = sampled()
    assert len(first) == 2
    assert sampled() == first


def test_chat_logprobs_belong_to_the_text(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=QUESTION, logprobs=True, top_logprobs=2, **GREEDY)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content
    content = choice.message.content or ""
    spelt = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content)
    assert spelt.decode().startswith(content)
    for token in choice.logprobs.content:
        assert token.logprob <= 0
        # greedy: the chosen token is the likeliest one
        assert token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob


def test_completions_have_logprobs_and_offsets(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=PROMPT, logprobs=1, **GREEDY)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
    assert tokens
    assert offsets
    assert len(tokens) == len(offsets) == len(choice.logprobs.token_logprobs or [])
    for token, offset in zip(tokens, offsets):
        assert choice.text[offset:].startswith(token) or offset + len(token) > len(choice.text)


def test_token_ids_of_a_text_prompt_give_the_same_completion(client: openai.OpenAI, model: str) -> None:
    by_text = client.completions.create(model=model, prompt=PROMPT, extra_body={"return_token_ids": True}, **GREEDY)
    extra: dict[str, Any] = by_text.choices[0].model_extra or {}
    prompt_ids: list[int] = extra["prompt_token_ids"]
    assert by_text.usage is not None
    assert len(prompt_ids) == by_text.usage.prompt_tokens
    assert len(extra["token_ids"]) == by_text.usage.completion_tokens
    by_ids = client.completions.create(model=model, prompt=prompt_ids, **GREEDY)
    assert by_ids.choices[0].text == by_text.choices[0].text
    several = client.completions.create(model=model, prompt=[prompt_ids, prompt_ids], **GREEDY)
    assert [one.text for one in several.choices] == [by_text.choices[0].text] * 2


def test_a_stream_returns_every_token_id_once(client: openai.OpenAI, model: str) -> None:
    more = {"return_token_ids": True}
    whole = client.completions.create(model=model, prompt=PROMPT, extra_body=more, **GREEDY).choices[0]
    stream = list(client.completions.create(model=model, prompt=PROMPT, stream=True, extra_body=more, **GREEDY))
    extras = [one.choices[0].model_extra or {} for one in stream]
    wanted = whole.model_extra or {}
    assert extras[0]["prompt_token_ids"] == wanted["prompt_token_ids"]
    assert [i for one in extras for i in one["token_ids"]] == wanted["token_ids"]
    assert "".join(one.choices[0].text for one in stream) == whole.text


def test_special_tokens_in_a_message_are_plain_text(client: openai.OpenAI, model: str) -> None:
    def count(text: str) -> int:
        messages: list[Any] = [{"role": "user", "content": text}]
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=1, temperature=0)
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    assert count("<|im_end|><|im_start|>system") - count("") > 4


def test_models_are_listed_and_found(client: openai.OpenAI, model: str) -> None:
    assert model in [one.id for one in client.models.list()]
    assert client.models.retrieve(model).id == model


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"temperature": 9}, "temperature"),
        ({"logit_bias": {"999999999": 1}}, "logit_bias"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": [{"role": "user", "content": "word " * 40_000}]}, "messages"),
    ],
)
def test_bad_requests_name_their_field(
    client: openai.OpenAI, model: str, change: dict[str, Any], param: str, stream: bool
) -> None:
    asked: dict[str, Any] = {"model": model, "messages": QUESTION, "stream": stream} | change
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked)
    assert (caught.value.param or "").startswith(param)
    assert caught.value.type == "invalid_request_error"


def test_a_closed_stream_leaves_the_mesh_serving(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.create(model=model, messages=QUESTION, stream=True, max_tokens=200) as stream:
        next(iter(stream))
    assert client.chat.completions.create(model=model, messages=QUESTION, **GREEDY).choices[0].message.content
