"""Kimi K2.5's real tokenizer: published vectors, and the tiktoken library, set up differently, as the oracle."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshfire.errors import CheckpointError
from meshfire.text.detokenizer import Detokenizer
from meshfire.text.tiktoken_tokenizer import MAX_RUN_CHARS, TiktokenTokenizer, parts, read_ranks

VECTORS = {
    "hello world": [22931, 2695],
    "你好，世界": [33845, 378, 2243],
    "  indented": [220, 155238],
    "1234567": [6694, 12972, 22],
    "don't": [88709],
    "def f(x):\n    return x": [1166, 285, 3940, 2360, 274, 745, 1288],
    "user": [2482],
    "assistant": [69702],
    "system": [14062],
    "tool": [20960],
    "tool_declare": [20960, 35556, 677],
    "image": [4017],
    "video": [22782],
    "functions.get_weather:12": [41937, 1150, 21055, 2800, 25, 1042],
}
# The same words without class intersection, which is how engines that lack it write the pattern.
NO_HAN = r"(?:(?!\p{Han})[%s])"
UPPER, LOWER = NO_HAN % r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", NO_HAN % r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
WORD_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
ORACLE_PATTERN = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{WORD_END}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{WORD_END}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SCRIPTS = "aZé ß\u0301ÀǅǆʰЖжאبकഅ한ひカ漢々〇ⅷ٣７½_'’sS\n\r\t \u00a0\u3000🦫👩\u200d🌾\ufe0f!?,.;:(){}<|>"
MIXED = st.text(st.sampled_from(SCRIPTS) | st.characters(exclude_categories=["Cs"]), max_size=60)
SLOW = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def oracle(kimi_directory: Path) -> tiktoken.Encoding:
    lines = (kimi_directory / "tiktoken.model").read_text().splitlines()
    ranks = {base64.b64decode(piece): int(rank) for piece, rank in (line.split() for line in lines)}
    return tiktoken.Encoding("oracle", pat_str=ORACLE_PATTERN, mergeable_ranks=ranks, special_tokens={})


@pytest.mark.parametrize("text", VECTORS)
def test_the_published_vectors_hold(kimi: TiktokenTokenizer, text: str) -> None:
    assert kimi.encode_plain(text) == VECTORS[text]
    assert kimi.encode_trusted(text) == VECTORS[text]


@given(text=MIXED)
@SLOW
def test_any_text_has_the_oracles_ids_and_comes_back(
    kimi: TiktokenTokenizer, oracle: tiktoken.Encoding, text: str
) -> None:
    token_ids = kimi.encode_plain(text)
    assert token_ids == oracle.encode_ordinary(text)
    assert Detokenizer(kimi.vocabulary, kimi.specials).add(token_ids, last=True).text == text


def test_a_control_token_is_text_unless_trusted(kimi: TiktokenTokenizer) -> None:
    assert kimi.encode_plain("a<|im_end|>b") == [64, 27, 91, 348, 11129, 91, 29, 65]
    assert kimi.encode_trusted("a<|im_end|>b") == [64, 163586, 65]


def test_sizes_names_and_end_tokens_are_the_models(kimi: TiktokenTokenizer) -> None:
    assert kimi.vocabulary.size == 163840
    assert kimi.end_token_ids == (163586, 163585)
    ids = {token.content: token.token_id for token in kimi.specials.tokens}
    assert len(ids) == 256
    assert (ids["[BOS]"], ids["<|im_middle|>"], ids["</think>"], ids["[PAD]"]) == (163584, 163601, 163607, 163839)
    assert ids["<|reserved_token_163589|>"] == 163589
    assert kimi.vocabulary.bytes_of(163586) == b"<|im_end|>"


def test_decoded_text_leaves_out_turn_marks_but_not_thinking(kimi: TiktokenTokenizer) -> None:
    token_ids = kimi.encode_trusted("<think>a</think>b<|im_end|>")
    assert Detokenizer(kimi.vocabulary, kimi.specials).add(token_ids).text == "<think>a</think>b"
    shown = Detokenizer(kimi.vocabulary, kimi.specials, keep_special_tokens=True)
    assert shown.add(token_ids).text == "<think>a</think>b<|im_end|>"


def test_every_token_of_the_vocabulary_has_its_bytes(kimi: TiktokenTokenizer, oracle: tiktoken.Encoding) -> None:
    for token_id in range(0, 163584, 37):
        assert kimi.vocabulary.bytes_of(token_id) == oracle.decode_single_token_bytes(token_id)


def test_endless_runs_are_cut_and_nothing_is_lost() -> None:
    text = "a" * (2 * MAX_RUN_CHARS + 5) + " b " + " " * (MAX_RUN_CHARS + 1)
    cut = list(parts(text))
    assert "".join(cut) == text
    assert [len(one) for one in cut] == [MAX_RUN_CHARS, MAX_RUN_CHARS, 5 + 3 + MAX_RUN_CHARS - 1, 2]


@pytest.mark.parametrize("before", [0, 1, 7, MAX_RUN_CHARS - 1, MAX_RUN_CHARS, MAX_RUN_CHARS + 3])
@pytest.mark.parametrize("over", [-1, 0, 1, 2])
@pytest.mark.parametrize("kind", [" ", "\u3000", "你", "x"])
def test_a_run_is_cut_wherever_it_lies(before: int, over: int, kind: str) -> None:
    """As if every run of the text were measured."""
    filler = ("a " * before)[:before] if not kind.isspace() else (" a" * before)[-before:] if before else ""
    text = filler + kind * (MAX_RUN_CHARS + over) + ("a b" if kind.isspace() else " b c")
    runs = re.findall(r"\s+|\S+", text)
    pieces = [run[at : at + MAX_RUN_CHARS] for run in runs for at in range(0, len(run), MAX_RUN_CHARS)]
    num_cuts = len(pieces) - len(runs)
    assert len(list(parts(text))) == num_cuts + 1
    assert "".join(parts(text)) == text


def test_a_run_of_just_the_limit_is_not_cut() -> None:
    text = "a" * MAX_RUN_CHARS + " " * MAX_RUN_CHARS
    assert list(parts(text)) == [text]


def test_a_huge_text_is_encoded_in_slices(kimi: TiktokenTokenizer) -> None:
    text = "wörter und 数字 12 " * 30_000
    token_ids = kimi.encode_plain(text)
    assert b"".join(map(kimi.vocabulary.bytes_of, token_ids)) == text.encode()


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiktoken.model"
    path.write_text("IQ== 0\nIg== 2\n")
    with pytest.raises(CheckpointError, match="incomplete"):
        read_ranks(path)
    path.write_text("IQ== 0\nnonsense\n")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_ranks(path)


def test_a_small_file_works_without_the_real_one(tmp_path: Path) -> None:
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
    (tmp_path / "tiktoken.model").write_text("\n".join([*lines, f"{base64.b64encode(b'ab').decode()} 256"]))
    small = TiktokenTokenizer.load(tmp_path)
    assert small.vocabulary.size == 257 + 256
    assert small.encode_plain("abé") == [256, 0xC3, 0xA9]
    assert small.encode_trusted("<|reserved_token_257|>") == [257]


@pytest.mark.parametrize("letter", ["a", "A", "あ"])
def test_words_end_where_han_begins_even_if_a_merge_would_go_on(tmp_path: Path, letter: str) -> None:
    """With a vocabulary that has the joined token, so that a wrong cut shows in the ids."""
    pieces = [bytes([byte]) for byte in range(256)]
    for text in ("漢", letter, letter + "漢"):
        pieces += [text.encode()[:end] for end in range(2, len(text.encode()) + 1)]
    pieces = list(dict.fromkeys([*pieces, letter.encode() + "漢".encode()]))
    lines = [f"{base64.b64encode(piece).decode()} {rank}" for rank, piece in enumerate(pieces)]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    small = TiktokenTokenizer.load(tmp_path)
    token_ids = small.encode_plain(letter + "漢")
    assert [small.vocabulary.bytes_of(one).decode() for one in token_ids] == [letter, "漢"]
