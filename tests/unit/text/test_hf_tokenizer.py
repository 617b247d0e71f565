"""tokenizer.json tokenizers, with the library's own, unchanged tokenizer as the oracle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from meshfire.errors import BadInput, CheckpointError
from meshfire.text import model_files
from meshfire.text.hf_tokenizer import HfTokenizer
from meshfire.text.tokenizer import load_tokenizer

ANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PIECES = st.sampled_from(
    [
        "<|im_start|>",
        "<|im_end|>",
        "<|im_",
        "end|>",
        "<",
        "|",
        ">",
        "</s>",
        "<s>",
        "<unk>",
        "<think>",
        "</think>",
        "    ",
    ]
)
TRICKY = st.lists(PIECES | st.text(max_size=4) | st.sampled_from([" the", "you ", "\n"]), max_size=12).map("".join)


@pytest.fixture(scope="module")
def library(any_directory: Path) -> Library:
    return Library.from_file(str(any_directory / "tokenizer.json"))


@given(text=st.text(max_size=40))
@ANY
def test_ordinary_text_has_the_librarys_ids(library: Library, any_tokenizer: HfTokenizer, text: str) -> None:
    assume(not any(token.content in text for token in any_tokenizer.specials.tokens))
    assert any_tokenizer.encode_plain(text) == library.encode(text, add_special_tokens=False).ids


@given(text=TRICKY)
@ANY
def test_trusted_text_has_the_librarys_ids(library: Library, any_tokenizer: HfTokenizer, text: str) -> None:
    assert any_tokenizer.encode_trusted(text) == library.encode(text, add_special_tokens=False).ids


@given(text=TRICKY)
@ANY
def test_plain_text_never_has_a_control_token(any_tokenizer: HfTokenizer, text: str) -> None:
    assert any_tokenizer.specials.ids.isdisjoint(any_tokenizer.encode_plain(text))


@given(text=TRICKY)
@ANY
def test_plain_byte_level_text_comes_back_as_it_was(tokenizer: HfTokenizer, text: str) -> None:
    token_ids = tokenizer.encode_plain(text)
    assert b"".join(map(tokenizer.vocabulary.bytes_of, token_ids)).decode() == text


def test_a_control_token_that_merges_spell_out_is_broken_up(fallback_directory: Path) -> None:
    made = HfTokenizer.load(fallback_directory)
    end = Library.from_file(str(fallback_directory / "tokenizer.json")).token_to_id("</s>")
    assert end in made.later.encode("</s>", add_special_tokens=False).ids, "else this test shows nothing"
    assert end not in made.encode_plain("</s>", at_start=False)


def test_every_tokens_bytes_are_what_the_library_decodes(library: Library, any_tokenizer: HfTokenizer) -> None:
    for token_id in range(library.get_vocab_size()):
        decoded = library.decode([token_id], skip_special_tokens=False)
        assert any_tokenizer.vocabulary.bytes_of(token_id).decode(errors="replace") == decoded


def test_lone_surrogates_become_replacement_characters(any_tokenizer: HfTokenizer) -> None:
    assert any_tokenizer.encode_plain("a\ud800b") == any_tokenizer.encode_plain("a\ufffdb")


def test_hidden_tokens_are_those_marked_special(tokenizer: HfTokenizer) -> None:
    hidden = {token.content for token in tokenizer.specials.tokens if token.hidden}
    assert hidden == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    assert {token.content for token in tokenizer.specials.tokens} - hidden == {"<think>", "</think>"}


def test_end_tokens_come_from_all_files_the_usual_one_first(directory: Path, tmp_path: Path) -> None:
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert load_tokenizer(tmp_path).end_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 9}, "eos_token_id": None}))
    assert load_tokenizer(tmp_path).end_token_ids == (7, 2, 9)


def test_a_model_with_more_rows_than_tokens_can_say_them_all(directory: Path, tmp_path: Path) -> None:
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1000}))
    vocabulary = load_tokenizer(tmp_path).vocabulary
    assert vocabulary.size == 1000
    assert vocabulary.bytes_of(999) == b""


@pytest.mark.parametrize("token_id", [-1, 10_000_000])
def test_an_id_out_of_range_is_named(tokenizer: HfTokenizer, token_id: int) -> None:
    with pytest.raises(BadInput, match=str(token_id)) as caught:
        tokenizer.vocabulary.bytes_of(token_id)
    assert caught.value.field == "token_ids"


def test_the_checksum_follows_every_file_that_matters(directory: Path, tmp_path: Path) -> None:
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    before = model_files.checksum(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert model_files.checksum(tmp_path) == before
    (tmp_path / "chat_template.jinja").write_text("other")
    assert model_files.checksum(tmp_path) != before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "no JSON object"),
        ('{"decoder": {"type": "WordPiece"}, "model": {"vocab": {"a": 0}}}', "cannot be read|decoder"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tmp_path)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json or tiktoken\.model"):
        load_tokenizer(tmp_path)
