"""Streaming text: the same whatever the grouping, whole characters only, stop texts found wherever tokens break."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfire.errors import BadInput
from meshfire.text.detokenizer import Detokenizer
from meshfire.text.specials import SpecialToken, SpecialTokens
from meshfire.text.vocabulary import Vocabulary

END, THINK = 256, 257
SPECIALS = SpecialTokens.of([SpecialToken(END, "<|end|>"), SpecialToken(THINK, "<think>", hidden=False)])
PIECES = [*(bytes([byte]) for byte in range(256)), b"<|end|>", b"<think>"]
EXTRA = ["RED", "-", "FLA", "G9", " more", "Tally: ", "X", "\n", "\nEN", "D tail", "a"]
VOCABULARY = Vocabulary([*PIECES, *(text.encode() for text in EXTRA)])
ID = {text: len(PIECES) + index for index, text in enumerate(EXTRA)}

#: token ids (a byte is its own id) that are mostly valid text, with some noise
TOKENS = st.lists(
    st.one_of(
        st.text(max_size=6).map(lambda text: list(text.encode())),
        st.sampled_from([[END], [THINK], [0x61], [0x62], [0x61, 0x62]]),
        st.binary(max_size=3).map(list),
    ),
    max_size=8,
).map(lambda parts: [one for part in parts for one in part])
STOPS = st.lists(st.text("ab<é\ufffd", min_size=1, max_size=4), max_size=3)


def new(*stops: str, keep: bool = False) -> Detokenizer:
    return Detokenizer(VOCABULARY, SPECIALS, stop=stops, keep_special_tokens=keep)


def cuts_of(data: st.DataObject, token_ids: list[int]) -> list[list[int]]:
    inner = data.draw(st.lists(st.integers(0, len(token_ids)), max_size=6).map(sorted))
    return [token_ids[a:b] for a, b in pairwise([0, *inner, len(token_ids)])]


def expected(token_ids: list[int], stops: list[str], keep: bool) -> tuple[str, str | None, int | None]:
    """By the definition: after each token look at the whole text; of all ends of stops take the first."""
    skipped = set() if keep else {END}
    data = b""
    for count, token_id in enumerate(token_ids, start=1):
        data += b"" if token_id in skipped else PIECES[token_id]
        text = certain(data)
        ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
        if ends:
            _, start, stop = min(ends)
            return text[:start], stop, count
    return certain(data), None, None


def certain(data: bytes) -> str:
    """Whole decoding without a character that is incomplete at the end."""
    tails = [n for n in range(1, min(3, len(data)) + 1) if is_incomplete(data[-n:])]
    return data[: len(data) - max(tails, default=0)].decode(errors="replace")


def is_incomplete(tail: bytes) -> bool:
    """Some continuation makes this one character."""
    try:
        tail.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.start == 0
    return False


@given(data=st.data(), token_ids=TOKENS, stops=STOPS, keep=st.booleans())
def test_any_grouping_gives_the_same_text_and_the_same_stop(
    data: st.DataObject, token_ids: list[int], stops: list[str], keep: bool
) -> None:
    text, stop, used = expected(token_ids, stops, keep)
    detokenizer, shown, before = new(*stops, keep=keep), "", 0
    groups = cuts_of(data, token_ids)
    for index, group in enumerate(groups):
        decoded = detokenizer.add(group, last=index == len(groups) - 1)
        shown += decoded.text
        assert text.startswith(shown), "text was shown that is not part of the output"
        if decoded.stop_hit is not None:
            assert (decoded.stop_hit, before + decoded.num_tokens_used) == (stop, used)
            break
        assert decoded.num_tokens_used == len(group)
        before += len(group)
    else:
        assert stop is None
    assert shown == text


@pytest.mark.parametrize(
    ("pieces", "content", "hit"),
    [
        (["Tally: ", "RED", "-", "FLA", "G9", " more"], "Tally: ", "RED-FLAG9"),
        (["Tally: ", "RED", "-", "FLA", "X"], "Tally: RED-FLAX", None),
        (["Tally: ", "RED", "-", "FLA"], "Tally: RED-FLA", None),
        (["a", "\n", "\nEN", "D tail"], "a", "\n\nEND"),
    ],
)
def test_a_stop_text_over_several_tokens_never_shows(pieces: list[str], content: str, hit: str | None) -> None:
    detokenizer, shown, hits = new("RED-FLAG9", "\n\nEND"), [], []
    for index, piece in enumerate(pieces):
        decoded = detokenizer.add([ID[piece]], last=index == len(pieces) - 1)
        shown.append(decoded.text)
        hits += [decoded.stop_hit] if decoded.stop_hit else []
    assert "".join(shown) == content
    assert hits == ([hit] if hit else [])
    if hit:
        assert not any("RED" in text or "\n" in text for text in shown)


def test_split_characters_appear_when_complete_and_only_then() -> None:
    detokenizer = new()
    pieces = ["4f6b20", "f09f", "a6ab", "20e6", "bd", "ae20", "f09f91a9e280", "8df09f8cbe", "21"]
    shown = [detokenizer.add(list(bytes.fromhex(piece))).text for piece in pieces]
    assert shown == ["Ok ", "", "🦫", " ", "", "潮 ", "👩", "\u200d🌾", "!"]


def test_a_character_cut_off_by_the_end_is_dropped() -> None:
    detokenizer = new()
    assert detokenizer.add(list(b"Ok ")).text == "Ok "
    assert detokenizer.add(list(b"\xf0\x9f"), last=True).text == ""


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    raw = b"a\xff\xf0\x9fb\xc3"
    assert new().add(list(raw), last=True).text == raw[:-1].decode(errors="replace") == "a\ufffd\ufffdb"


def test_held_text_is_released_at_the_end() -> None:
    detokenizer = new("abc")
    assert detokenizer.add(list(b"xab")).text == "x"
    assert detokenizer.add([], last=True).text == "ab"


def test_of_overlapping_stops_the_one_complete_first_wins() -> None:
    assert new("abcd", "bc").add(list(b"abcd")).stop_hit == "bc"
    assert new("c", "abc").add(list(b"abc")).text == ""


def test_nothing_follows_the_end() -> None:
    detokenizer = new("b")
    first = detokenizer.add(list(b"abc"))
    assert (first.text, first.stop_hit, first.num_tokens_used) == ("a", "b", 2)
    after = detokenizer.add(list(b"xyz"), last=True)
    assert (after.text, after.stop_hit, after.num_tokens_used) == ("", None, 0)


def test_a_hidden_token_between_the_halves_of_a_character_does_not_matter() -> None:
    assert new().add([0xC3, END, 0xA9]).text == "é"
    assert new(keep=True).add([0xC3, END, 0xA9, THINK]).text == "\ufffd<|end|>\ufffd<think>"


def test_an_unknown_id_changes_nothing() -> None:
    detokenizer = new()
    with pytest.raises(BadInput) as caught:
        detokenizer.add([0x61, 100_000])
    assert caught.value.field == "token_ids"
    assert detokenizer.add([0x62]).text == "b"


def test_an_empty_stop_text_is_refused() -> None:
    with pytest.raises(BadInput) as caught:
        new("x", "")
    assert caught.value.field == "stop"


def test_bytes_of_ids_are_exact() -> None:
    assert new().bytes_of([0xF0, END, ID["RED"]]) == [b"\xf0", b"<|end|>", b"RED"]
