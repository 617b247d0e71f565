"""POST /v1/completions over real HTTP against a scripted router."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from meshfire.api.common.v1 import sampling_pb2
from meshfire.api.router.v1 import inference_service_pb2 as pb
from tests.unit.gateway.conftest import Gateway
from tests.unit.gateway.fake_router import MODEL, PROMPT_IDS, delta, finished, logprob, saying, started
from tests.unit.gateway.test_chat import events

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "Once"}


async def test_an_answer_has_openais_shape(gateway: Gateway) -> None:
    answer = (await gateway.post(PATH, BODY)).json()
    assert (answer["id"], answer["object"]) == ("cmpl-r1", "text_completion")
    assert answer["choices"] == [
        {"index": 0, "text": "Hello you", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert answer["usage"]["total_tokens"] == 6


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
    ],
)
async def test_a_prompt_is_text_texts_ids_or_lists_of_ids(gateway: Gateway, prompt: Any, expected: list[Any]) -> None:
    answer = (await gateway.post(PATH, BODY | {"prompt": prompt})).json()
    asked = [
        one.text if one.WhichOneof("prompt") == "text" else tuple(one.token_ids.ids) for one in gateway.router.requests
    ]
    assert sorted(asked) == sorted(expected)
    assert len(answer["choices"]) == len(expected)
    assert answer["usage"]["prompt_tokens"] == len(expected) * len(PROMPT_IDS)


async def test_several_prompts_with_n_are_ordered_by_prompt(gateway: Gateway) -> None:
    async def echo(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        yield started()
        yield delta(f"{request.text}{request.sampling.seed}", [1])
        yield finished(1)

    gateway.router.behave = echo
    answer = (await gateway.post(PATH, BODY | {"prompt": ["a", "b"], "n": 2, "seed": 0})).json()
    assert [one["text"] for one in answer["choices"]] == ["a0", "a1", "b0", "b1"]
    assert answer["usage"]["prompt_tokens"] == 2 * len(PROMPT_IDS)


async def test_logprobs_list_tokens_offsets_and_always_the_chosen_token(gateway: Gateway) -> None:
    logprobs = (await gateway.post(PATH, BODY | {"logprobs": 1})).json()["choices"][0]["logprobs"]
    assert gateway.router.requests[0].sampling.num_logprobs == 1
    assert logprobs == {
        "tokens": ["Hello", " you"],
        "token_logprobs": [-0.25, -0.75],
        "top_logprobs": [{"Hello": -0.25, "Hi": -1.5}, {" all": -0.5, " you": -0.75}],
        "text_offset": [0, 5],
    }


async def test_offsets_count_characters_even_when_a_character_spans_tokens(gateway: Gateway) -> None:
    pieces = [b"a", b"\xf0\x9f", b"\xa6\xab", b"b"]
    gateway.router.behave = saying(
        started(), delta("a🦫b", [1, 2, 3, 4], [logprob(piece) for piece in pieces]), finished(4)
    )
    logprobs = (await gateway.post(PATH, BODY | {"logprobs": 0})).json()["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 1, 1, 2]


async def test_a_stream_equals_the_whole_answer(gateway: Gateway) -> None:
    asked = {"logprobs": 1, "return_token_ids": True}
    whole = (await gateway.post(PATH, BODY | asked)).json()["choices"][0]
    parts = [one["choices"][0] for one in events(await gateway.post(PATH, BODY | asked | {"stream": True}))]
    assert "".join(one["text"] for one in parts) == whole["text"]
    assert [i for one in parts for i in one["token_ids"]] == whole["token_ids"] == [101, 102, 2]
    assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"] == list(PROMPT_IDS)
    logprobs = [one["logprobs"] for one in parts if one["logprobs"]]
    assert {key: [x for one in logprobs for x in one[key]] for key in logprobs[0]} == whole["logprobs"]
    assert [one["finish_reason"] for one in parts][-1] == "stop"


async def test_a_stream_has_a_usage_chunk_only_on_request(gateway: Gateway) -> None:
    plain = events(await gateway.post(PATH, BODY | {"stream": True}))
    assert all(one["choices"] and "usage" not in one for one in plain)
    counted = events(await gateway.post(PATH, BODY | {"stream": True, "stream_options": {"include_usage": True}}))
    assert counted[-1]["choices"] == []
    assert counted[-1]["usage"]["completion_tokens"] == 3


async def test_best_of_returns_the_likeliest_outputs_and_bills_all(gateway: Gateway) -> None:
    async def graded(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        value = {0: -3.0, 1: -1.0, 2: -2.0}[request.sampling.seed]
        yield started()
        yield delta(str(request.sampling.seed), [1], [logprob(b"x", value)])
        yield finished(1)

    gateway.router.behave = graded
    answer = (await gateway.post(PATH, BODY | {"best_of": 3, "n": 2, "seed": 0})).json()
    assert [(one["index"], one["text"]) for one in answer["choices"]] == [(0, "1"), (1, "2")]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 3


async def test_the_old_endpoint_keeps_its_default_of_sixteen_tokens(gateway: Gateway) -> None:
    await gateway.post(PATH, BODY)
    assert gateway.router.requests[0].sampling.max_tokens == 16


# --- echo -------------------------------------------------------------------------------------------------------------


def prompt_part(text: str, ids: Sequence[int], *pieces: bytes, first: bytes = b"") -> pb.GenerateResponse:
    logprobs = [logprob(piece, -0.5 - at, [(b"top", -0.25)]) for at, piece in enumerate(pieces)]
    return pb.GenerateResponse(prompt=pb.GeneratePrompt(text=text, token_ids=ids, logprobs=logprobs, first_piece=first))


async def test_echo_puts_the_prompt_before_the_output(gateway: Gateway) -> None:
    gateway.router.behave = saying(started(), prompt_part("Once", []), delta(" more", [1]), finished(1))
    (choice,) = (await gateway.post(PATH, BODY | {"echo": True})).json()["choices"]
    assert (choice["text"], choice["logprobs"]) == ("Once more", None)
    (asked,) = gateway.router.requests
    assert asked.echo
    assert not asked.sampling.HasField("num_prompt_logprobs")


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_lists_the_prompts_tokens_first_and_the_first_without(
    gateway: Gateway, stream: bool
) -> None:
    gateway.router.behave = saying(
        started(),
        prompt_part("On\N{HORIZONTAL ELLIPSIS}ce", [5, 6], b"\xe2\x80\xa6", first=b"On"),
        prompt_part("", [7], b"ce"),
        delta(" m", [1], [logprob(b" m", -4.0)]),
        finished(1),
    )
    answer = await gateway.post(PATH, BODY | {"echo": True, "logprobs": 1, "stream": stream})
    choices = [one["choices"][0] for one in events(answer)] if stream else answer.json()["choices"]
    told = [one["logprobs"] for one in choices if one["logprobs"]]
    assert {key: [x for one in told for x in one[key]] for key in told[0]} == {
        "tokens": ["On", "\N{HORIZONTAL ELLIPSIS}", "ce", " m"],
        "token_logprobs": [None, -0.5, -0.5, -4.0],
        "top_logprobs": [
            None,
            {"top": -0.25, "\N{HORIZONTAL ELLIPSIS}": -0.5},
            {"top": -0.25, "ce": -0.5},
            {" m": -4.0},
        ],
        "text_offset": [0, 2, 3, 5],
    }
    assert "".join(one["text"] for one in choices) == "On\N{HORIZONTAL ELLIPSIS}ce m"
    assert gateway.router.requests[0].sampling.num_prompt_logprobs == 1


async def test_no_new_tokens_are_asked_for_with_echo(gateway: Gateway) -> None:
    gateway.router.behave = saying(started(), prompt_part("Once", []), finished(0, sampling_pb2.FINISH_REASON_LENGTH))
    answer = (await gateway.post(PATH, BODY | {"echo": True, "max_tokens": 0})).json()
    assert gateway.router.requests[0].sampling.max_tokens == 0
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("Once", "length")
    assert answer["usage"]["completion_tokens"] == 0


async def test_the_prompts_likelihood_does_not_rank_outputs(gateway: Gateway) -> None:
    async def graded(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        yield started()
        yield prompt_part("Once", [5, 6], b"nce" * (1 + request.sampling.seed), first=b"O")
        yield delta(str(request.sampling.seed), [1], [logprob(b"x", [-2.0, -1.0][request.sampling.seed])])
        yield finished(1)

    gateway.router.behave = graded
    answer = (await gateway.post(PATH, BODY | {"best_of": 2, "seed": 0, "echo": True, "logprobs": 0})).json()
    assert [one["text"] for one in answer["choices"]] == ["Once1"]


# --- several outputs of one prompt ------------------------------------------------------------------------------------


async def test_only_what_no_output_had_to_compute_counts_as_cached(gateway: Gateway) -> None:
    async def joined(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """Output 1 computes the prompt, the others find it."""
        yield started()
        yield delta("x", [1])
        yield finished(1, num_cached=0 if request.sampling.seed == 1 else 2)

    gateway.router.behave = joined
    usage = (await gateway.post(PATH, BODY | {"n": 3, "seed": 0})).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT_IDS), 3)


@pytest.mark.parametrize(
    ("asked", "keys"),
    [({}, {""}), ({"n": 3}, None), ({"n": 3, "prompt_cache_key": "mine"}, {"mine"})],
)
async def test_outputs_of_one_prompt_go_to_one_prefill_worker(
    gateway: Gateway, asked: dict[str, Any], keys: set[str] | None
) -> None:
    for _ in range(2):
        await gateway.post(PATH, BODY | asked)
    found = {one.session_key for one in gateway.router.requests}
    assert len(found) == 1
    assert found == keys if keys is not None else found != {""}
    await gateway.post(PATH, BODY | asked | {"prompt": "another"})
    assert keys is not None or gateway.router.requests[-1].session_key not in found
