"""The pure parts: requests to calls, messages to outputs, tokens to offsets."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway import sse
from services.gateway.errors import HttpError
from services.gateway.openai.chat import ChatDialect
from services.gateway.openai.completions import CompletionDialect
from services.gateway.openai.errors import path_in_body
from services.gateway.openai.objects import TextOffsets, token_text
from services.gateway.outputs import Output, total
from tests.unit.gateway.fake_router import delta, finished, started

USER = {"role": "user", "content": "Hi"}


def chat(**more: Any) -> Any:
    """The first call's request of a chat body."""
    return ChatDialect(128).parse({"model": "m", "messages": [USER]} | more).calls[0].request


def test_text_parts_are_joined_without_a_separator() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}, {"type": "text", "text": ""}]
    assert chat(messages=[{"role": "user", "content": parts}]).chat.messages[0].content == "a b"
    assert chat(messages=[{"role": "user", "content": []}]).chat.messages[0].content == ""


def test_an_assistants_missing_content_is_empty_and_never_none() -> None:
    turns = [USER, {"role": "assistant", "content": None}, {"role": "assistant", "refusal": None}, USER]
    assert [one.content for one in chat(messages=turns).chat.messages] == ["Hi", "", "", "Hi"]


def test_an_answer_of_ours_can_be_sent_back_as_history() -> None:
    said = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "audio": None, "annotations": []}
    assert chat(messages=[USER, said, USER]).chat.messages[1].content == "x"


def test_a_developer_is_a_system() -> None:
    turns = [{"role": "developer", "content": "Be brief.", "name": "ops"}, USER]
    first = chat(messages=turns).chat.messages[0]
    assert (first.role, first.content, first.name) == ("system", "Be brief.", "ops")


def test_what_is_not_given_stays_unset_so_that_the_models_default_holds() -> None:
    fields = {descriptor.name for descriptor, _ in chat(temperature=None).sampling.ListFields()}
    assert fields == set()


def test_every_sampling_parameter_arrives() -> None:
    given_values = {
        "max_completion_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "presence_penalty": -1.5,
        "frequency_penalty": 1.5,
        "repetition_penalty": 0.75,
        "logit_bias": {"5": -100, "6": 2.5},
        "seed": -3,
        "stop": "END",
        "stop_token_ids": [4],
        "ignore_eos": True,
    }
    request = chat(**given_values, skip_special_tokens=False, cache_salt="s", add_generation_prompt=False)
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.top_k, sampling.seed) == (9, 2, 7, -3)
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.25, 0.125)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-1.5, 1.5, 0.75)
    assert dict(sampling.logit_bias) == {5: -100, 6: 2.5}
    assert (list(sampling.stop), list(sampling.stop_token_ids), sampling.ignore_eos) == (["END"], [4], True)
    assert not sampling.HasField("num_logprobs")
    assert (request.keep_special_tokens, request.cache_salt, request.chat.omit_generation_prompt) == (True, "s", True)


def test_both_limits_may_be_given_if_they_agree() -> None:
    assert chat(max_tokens=5, max_completion_tokens=5).sampling.max_tokens == 5
    assert chat(max_tokens=5).sampling.max_tokens == 5


def test_words_of_other_servers_for_off_are_understood() -> None:
    assert chat(top_k=-1).sampling.top_k == 0
    assert 0 < chat(top_p=0).sampling.top_p < 1e-3


def test_template_arguments_travel_as_json() -> None:
    assert json.loads(chat(chat_template_kwargs={"thinking": False}).chat.template_kwargs_json) == {"thinking": False}
    assert chat(chat_template_kwargs={}).chat.template_kwargs_json == ""


@given(seed=st.integers(-(2**63), 2**63 - 1), n=st.integers(1, 8))
def test_seeds_of_n_outputs_differ_and_fit_64_bits(seed: int, n: int) -> None:
    job = CompletionDialect(128).parse({"model": "m", "prompt": "x", "seed": seed, "n": n})
    seeds = [call.request.sampling.seed for call in job.calls]
    assert len(set(seeds)) == n
    assert seeds[0] == seed


def test_the_number_of_outputs_is_bounded_over_prompts_and_n() -> None:
    body = {"model": "m", "prompt": ["a", "b"], "n": 2}
    assert len(CompletionDialect(4).parse(body).calls) == 4
    with pytest.raises(HttpError, match="4 outputs"):
        CompletionDialect(3).parse(body)


@pytest.mark.parametrize(
    ("router", "body"),
    [
        (None, None),
        ("model", "model"),
        ("sampling.top_p", "top_p"),
        ("sampling.stop[2]", "stop[2]"),
        ("sampling.logit_bias[7]", "logit_bias"),
        ("sampling.num_logprobs", "logprobs"),
        ("chat", "messages"),
        ("chat.messages[1].role", "messages[1].role"),
        ("chat.template_kwargs_json", "chat_template_kwargs"),
        ("text", "prompt"),
        ("token_ids.ids[3]", "prompt[3]"),
        ("token_ids", "prompt"),
        ("x-meshfire-script", "x-meshfire-script"),
    ],
)
def test_the_routers_paths_become_the_bodys(router: str | None, body: str | None) -> None:
    assert path_in_body(router) == body


@given(st.text(), st.data())
def test_offsets_are_those_of_the_characters_that_tokens_begin_in(text: str, data: st.DataObject) -> None:
    raw = text.encode("utf-8", "ignore")
    text = raw.decode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=8)) | {0, len(raw)})
    offsets = TextOffsets()
    for start, end in itertools.pairwise(cuts):
        # oracle: whole characters before the cut
        assert offsets.next(raw[start:end]) == len(raw[:start].decode("utf-8", "ignore"))


@given(st.binary(max_size=6))
def test_a_tokens_string_never_holds_a_replacement_character_of_our_making(piece: bytes) -> None:
    shown = token_text(piece)
    if shown.startswith("bytes:") and shown != piece.decode("utf-8", "ignore"):
        assert bytes.fromhex(shown.removeprefix("bytes:").replace("\\x", "")) == piece
    else:
        assert shown.encode() == piece


@given(st.dictionaries(st.text(), st.text()))
def test_an_event_is_one_line_and_reads_back(payload: dict[str, str]) -> None:
    raw = sse.event(payload) if all(_plain(s) for pair in payload.items() for s in pair) else sse.event({})
    line, rest = raw.decode()[:-2], raw.decode()[-2:]
    assert rest == "\n\n"
    assert len(line.splitlines()) == 1
    assert json.loads(line.removeprefix("data: ")) in (payload, {})


def _plain(text: str) -> bool:
    return not any(0xD800 <= ord(one) < 0xE000 for one in text)


def test_an_end_token_is_appended_once_however_the_router_counts() -> None:
    apart, within = Output(0, 0), Output(0, 0)
    for output, ids in ((apart, [5]), (within, [5, 2])):
        output.add(started())
        output.add(delta("a", ids))
        output.add(finished(2, stop_token_id=2))
        assert output.token_ids == [5, 2]


def test_prompts_are_billed_once_each() -> None:
    outputs = [Output(0, 0), Output(1, 0), Output(2, 1)]
    for output in outputs:
        output.add(started())
        output.add(finished(4, num_cached=1))
    assert (total(outputs).num_prompt_tokens, total(outputs).num_output_tokens) == (6, 12)
    assert total(outputs).num_cached_tokens == 2
