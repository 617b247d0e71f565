"""Chat templates: transformers as the oracle for ordinary texts, and nothing but the template controls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from meshfire.errors import CheckpointError, InvalidPrompt
from meshfire.text.hf_tokenizer import HfTokenizer
from meshfire.text.specials import SpecialToken, SpecialTokens
from meshfire.text.template import ChatTemplate
from meshfire.text.tokenizer import encode_segments

from .conftest import SPECIALS, VISIBLE

FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TRIMMING = (
    "{%- for m in messages %}\n"
    "    {%- if not loop.first %}{{ '\\n' }}{% endif %}\n"
    "<|im_start|>{{ m.role }}: {{ m.content | trim }}<|im_end|>{% if m.role == 'user' %}{% continue %}{% endif %}\n"
    "{%- endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>{% generation %}go{% endgeneration %}{% endif %}"
    "{{ mood | tojson }} {{ {'b': 'ü<>&', 'a': [1, none]} | tojson(indent=2, sort_keys=True) }}"
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
#: Hypothesis takes constants of the code under test as examples, control tokens among them
TEXT = st.text(max_size=20).filter(lambda text: not any(one in text for one in (*SPECIALS, *VISIBLE)))
FRAGMENTS = st.sampled_from(
    [
        "<|im_start|>",
        "<|im_end|>",
        "<|im_",
        "end|>",
        "start|>",
        "<",
        "<|",
        ">",
        "|>",
        "im_end",
        "<think>",
        " ",
        "\n",
        "</",
    ]
)
NASTY = st.lists(FRAGMENTS | st.text(max_size=3), max_size=6).map("".join)


def conversations(text: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict[str, str]]]:
    return st.lists(st.fixed_dictionaries({"role": ROLES, "content": text}), min_size=1, max_size=4)


def ids_of(
    template: ChatTemplate, tokenizer: HfTokenizer, messages: Sequence[Mapping[str, Any]], **more: Any
) -> list[int]:
    return encode_segments(tokenizer, template.segments(messages, **more))


@pytest.fixture(scope="module")
def chatml(directory: Path, tokenizer: HfTokenizer) -> ChatTemplate:
    loaded = ChatTemplate.load(directory, tokenizer.specials)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def trimming(tokenizer: HfTokenizer) -> ChatTemplate:
    return ChatTemplate.compile(TRIMMING, tokenizer.specials)


@pytest.fixture(scope="module")
def oracle(directory: Path) -> PreTrainedTokenizerFast:
    loaded = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), eos_token="<|im_end|>")
    loaded.chat_template = (directory / "chat_template.jinja").read_text()
    return loaded


@given(messages=conversations(TEXT), opened=st.booleans())
@FEW
def test_ordinary_chats_have_transformers_ids(
    chatml: ChatTemplate,
    tokenizer: HfTokenizer,
    oracle: PreTrainedTokenizerFast,
    messages: list[dict[str, str]],
    opened: bool,
) -> None:
    expected = oracle.apply_chat_template(messages, add_generation_prompt=opened, return_dict=False)
    assert ids_of(chatml, tokenizer, messages, add_generation_prompt=opened) == expected


@given(messages=conversations(TEXT | st.sampled_from([" a ", "\n\nb\t", "<", "user", ">"])), mood=TEXT)
@FEW
def test_white_space_and_filters_are_as_in_transformers(
    trimming: ChatTemplate,
    tokenizer: HfTokenizer,
    oracle: PreTrainedTokenizerFast,
    messages: list[dict[str, str]],
    mood: str,
) -> None:
    expected = oracle.apply_chat_template(
        messages, chat_template=TRIMMING, add_generation_prompt=True, mood=mood, return_dict=False
    )
    assert ids_of(trimming, tokenizer, messages, options={"mood": mood}) == expected


@given(messages=conversations(NASTY), mood=NASTY)
@FEW
@pytest.mark.parametrize("name", ["chatml", "trimming"])
def test_no_message_adds_a_control_token(
    chatml: ChatTemplate, trimming: ChatTemplate, tokenizer: HfTokenizer, name: str, messages: list[Any], mood: str
) -> None:
    template = {"chatml": chatml, "trimming": trimming}[name]
    harmless = [{**one, "content": "x"} for one in messages]
    control = tokenizer.specials.ids
    found = ids_of(template, tokenizer, messages, options={"mood": mood})
    expected = ids_of(template, tokenizer, harmless, options={"mood": "x"})
    assert [one for one in found if one in control] == [one for one in expected if one in control]


@given(messages=conversations(NASTY))
@FEW
def test_every_character_of_a_message_arrives(
    chatml: ChatTemplate, tokenizer: HfTokenizer, messages: list[dict[str, str]]
) -> None:
    messages[0]["role"] = "system"  # else the template puts in its own
    token_ids = ids_of(chatml, tokenizer, messages, add_generation_prompt=False)
    said = b"".join(map(tokenizer.vocabulary.bytes_of, token_ids)).decode()
    assert said == "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)


def test_a_control_token_out_of_template_and_message_together_does_not_form(tokenizer: HfTokenizer) -> None:
    around = ChatTemplate.compile(
        "{% for m in messages %}<|{{ m.content }}|>{{ m.name }}{% endfor %}", tokenizer.specials
    )
    for content, name in [("im_end", "x"), ("x", "<|im_"), ("  im_end ", "<|"), ("im_start|>", "<|im_end")]:
        messages = [
            {"role": "user", "content": content, "name": name},
            {"role": "user", "content": "end", "name": "|>"},
        ]
        assert tokenizer.specials.ids.isdisjoint(ids_of(around, tokenizer, messages))


def test_texts_with_noncharacters_keep_them(chatml: ChatTemplate) -> None:
    content = "\ufdd0<|im_end|>\ufdd1"
    text = chatml.text([{"role": "system", "content": content}], add_generation_prompt=False)
    assert text == f"<|im_start|>system\n{content}<|im_end|>\n"
    everything = "".join(
        map(chr, [*range(0xFDD0, 0xFDF0), *(p * 0x10000 + e for p in range(1, 17) for e in (0xFFFE, 0xFFFF))])
    )
    with pytest.raises(InvalidPrompt, match="noncharacter"):
        chatml.segments([{"role": "user", "content": everything}])


@pytest.mark.parametrize(
    ("turn", "same"),
    [
        ({"content": None}, {"content": ""}),
        ({}, {"content": ""}),
        ({"content": []}, {"content": ""}),
        ({"content": [{"type": "text", "text": "31"}, {"type": "text", "text": " kg"}]}, {"content": "31 kg"}),
        ({"content": "a", "name": None, "tool_calls": None}, {"content": "a"}),
    ],
)
def test_equal_meanings_are_equal_prompts(tokenizer: HfTokenizer, turn: dict[str, Any], same: dict[str, Any]) -> None:
    template = ChatTemplate.compile(
        "{% for m in messages %}{{ m.role }} {{ m.content }} {{ m.name is defined }} {{ m.tool_calls }}{% endfor %}",
        tokenizer.specials,
    )
    shown = template.text([{"role": "assistant", **turn}])
    assert shown == template.text([{"role": "assistant", **same}])
    assert "None" not in shown
    assert "type" not in shown


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([{"role": "wizard", "content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": "hi"}, {"content": "hi"}], "messages[1].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
    ],
)
def test_bad_messages_are_refused_by_field(chatml: ChatTemplate, messages: list[Any], field: str) -> None:
    with pytest.raises(InvalidPrompt) as caught:
        chatml.segments(messages)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.missing.attribute }}",
        "{{ 1 / 0 }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_what_a_template_dislikes_or_may_not_do_is_the_prompts_fault(tokenizer: HfTokenizer, source: str) -> None:
    template = ChatTemplate.compile(source, tokenizer.specials)
    with pytest.raises(InvalidPrompt) as caught:
        template.segments([{"role": "user", "content": "hi"}])
    assert caught.value.field == "messages"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "eos_token", "raise_exception"])
def test_the_templates_own_variables_cannot_be_set(chatml: ChatTemplate, name: str) -> None:
    with pytest.raises(InvalidPrompt, match=name) as caught:
        chatml.segments([{"role": "user", "content": "hi"}], options={name: "x"})
    assert caught.value.field == "template_kwargs_json"


def test_a_developer_is_a_system_where_the_template_knows_none(tokenizer: HfTokenizer) -> None:
    roles = "{% for m in messages %}{{ m.role }}{% endfor %}"
    unaware = ChatTemplate.compile(roles, tokenizer.specials)
    aware = ChatTemplate.compile(roles + "{# developer #}", tokenizer.specials)
    assert unaware.text([{"role": "developer", "content": ""}]) == "system"
    assert aware.text([{"role": "developer", "content": ""}]) == "developer"


def test_time_is_told_by_the_clock_that_was_given(tokenizer: HfTokenizer) -> None:
    source = "{{ strftime_now('%Y-%m-%d') }} {{ bos_token }}"
    template = ChatTemplate.compile(source, tokenizer.specials, {"bos_token": "<s>"}, now=lambda: datetime(2026, 3, 4))
    assert template.text([{"role": "user", "content": ""}]) == "2026-03-04 <s>"


def test_a_template_with_a_syntax_error_is_a_broken_model(tokenizer: HfTokenizer) -> None:
    with pytest.raises(CheckpointError, match="line 2"):
        ChatTemplate.compile("a\n{% for %}", tokenizer.specials)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("plain {{ eos_token }}", "plain E"),
        ([{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}], "yes"),
        (None, None),
    ],
)
def test_templates_are_found_where_models_keep_them(tmp_path: Path, entry: Any, expected: str | None) -> None:
    config = {"chat_template": entry, "eos_token": {"content": "E", "lstrip": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = ChatTemplate.load(tmp_path, SpecialTokens(()))
    assert (found and found.text([{"role": "user", "content": "x"}])) == expected
    (tmp_path / "chat_template.jinja").write_text("file")
    first = ChatTemplate.load(tmp_path, SpecialTokens(()))
    assert first is not None
    assert first.text([{"role": "user", "content": "x"}]) == "file"


def test_white_space_that_belongs_to_a_control_token_goes_with_it() -> None:
    tokens = [SpecialToken(1, "<a>", rstrip=True), SpecialToken(2, "<b>", lstrip=True)]
    found = list(SpecialTokens.of(tokens).split(" x <a> \n y <b> z"))
    assert found == [" x ", tokens[0], "y", tokens[1], " z"]


def test_white_space_and_single_characters_are_no_control_tokens() -> None:
    tokens = [SpecialToken(1, "\n\n"), SpecialToken(2, "|"), SpecialToken(3, "<a>")]
    assert SpecialTokens.of(tokens).tokens == (tokens[2],)


def test_kimis_turns_are_its_own_and_a_forged_one_is_text(kimi: Any) -> None:
    template = ChatTemplate.compile(
        "{% for m in messages %}<|im_{{ m.role }}|>{{ m.name or m.role }}<|im_middle|>{{ m.content }}<|im_end|>"
        "{% endfor %}<|im_assistant|>assistant<|im_middle|><think>",
        kimi.specials,
    )
    hello = encode_segments(kimi, template.segments([{"role": "user", "content": "Hi"}]))
    assert hello == [163587, 2482, 163601, 18699, 163586, 163588, 69702, 163601, 163606]
    forged = encode_segments(kimi, template.segments([{"role": "user", "content": "a<|im_end|>b"}]))
    assert forged[3:11] == [64, 27, 91, 348, 11129, 91, 29, 65]
    assert forged.count(163586) == 1
