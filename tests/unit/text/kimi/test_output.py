"""The output parser: every form that checkpoints were seen to write, and no token boundary that could matter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfire.text.kimi.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from meshfire.text.kimi.headers import Functions
from meshfire.text.kimi.markers import Marker, Markers
from meshfire.text.kimi.output import OutputParser, State
from meshfire.text.tiktoken_tokenizer import TiktokenTokenizer

SECTION, END_SECTION = Marker.SECTION_BEGIN.value, Marker.SECTION_END.value
CALL, ARGS, END_CALL = Marker.CALL_BEGIN.value, Marker.ARGUMENTS_BEGIN.value, Marker.CALL_END.value


def tool(name: str, *parameters: str) -> dict[str, Any]:
    properties = {one: {"type": "string"} for one in parameters}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [tool("get_weather", "city", "unit"), tool("search", "query"), tool("read-file", "path")]


@dataclass
class Call:
    call_id: str
    name: str
    arguments: str = ""
    is_valid: bool | None = None


@dataclass
class Answer:
    """Events joined by kind."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    @classmethod
    def of(cls, events: Sequence[Event]) -> Answer:
        answer = cls()
        for event in events:
            match event:
                case Reasoning(text):
                    answer.reasoning += text
                case Content(text):
                    answer.content += text
                case CallBegin(index, call_id, name):
                    assert index == len(answer.calls)
                    answer.calls.append(Call(call_id, name))
                case CallArguments(index, text):
                    assert index == len(answer.calls) - 1
                    assert text
                    answer.calls[index].arguments += text
                case CallEnd(index, is_valid):
                    answer.calls[index].is_valid = is_valid
        return answer


def parser_of(kimi: TiktokenTokenizer, start: State, tools: list[dict[str, Any]], first_call: int = 0) -> OutputParser:
    markers = Markers.find(kimi.specials)
    assert markers is not None
    return OutputParser(
        kimi.vocabulary, markers, start=start, functions=Functions.declared(list(tools)), first_call=first_call
    )


def parse(
    kimi: TiktokenTokenizer,
    text: str,
    start: State = State.CONTENT,
    tools: list[dict[str, Any]] = TOOLS,
    *,
    first_call: int = 0,
) -> Answer:
    parser = parser_of(kimi, start, tools, first_call)
    return Answer.of([*parser.add(kimi.encode_trusted(text)), *parser.finish()])


def call(header: str, arguments: str) -> str:
    return f"{CALL}{header}{ARGS}{arguments}{END_CALL}"


def section(*calls: str) -> str:
    return SECTION + "".join(calls) + END_SECTION


def test_thinking_then_content_then_parallel_calls(small_kimi: TiktokenTokenizer) -> None:
    text = "why not \n</think>Let me look." + section(
        call("functions.get_weather:0", '{"city": "Oslo"}'), call("functions.search:1", '{"query": "a<b"}')
    )
    answer = parse(small_kimi, text, State.REASONING)
    assert (answer.reasoning, answer.content) == ("why not", "Let me look.")
    assert [(one.call_id, one.name, one.arguments, one.is_valid) for one in answer.calls] == [
        ("functions.get_weather:0", "get_weather", '{"city": "Oslo"}', True),
        ("functions.search:1", "search", '{"query": "a<b"}', True),
    ]


def test_a_section_inside_the_reasoning_ends_it(small_kimi: TiktokenTokenizer) -> None:
    for opening in (SECTION, ""):  # some forget the section, too
        answer = parse(small_kimi, "Need it. " + opening + call("functions.search:0", "{}"), State.REASONING)
        assert (answer.reasoning, answer.content, len(answer.calls)) == ("Need it.", "", 1)


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("functions.get_weather:0", "get_weather"),
        (" functions.get_weather:12 \n", "get_weather"),
        ("functions_get_weather_1", "get_weather"),
        ("get_weather:0", "get_weather"),
        ("get_weather", "get_weather"),
        ("functions(get_weather):2.0", "get_weather"),
        ("functions.get_weather3", "get_weather"),
        ("functionsget_weather5", "get_weather"),
        ("functions.read_file:0", "read-file"),
        ("functions.read-file:0", "read-file"),
        ("functions.not_declared:4", "not_declared"),
        ("call_8f3ab1", "search"),
        ("call00003", "search"),
        ("0", "search"),
    ],
)
def test_headers_in_many_spellings(small_kimi: TiktokenTokenizer, header: str, name: str) -> None:
    answer = parse(small_kimi, section(call(header, '{"query": "x"}')), first_call=7)
    assert [(one.call_id, one.name, one.arguments) for one in answer.calls] == [
        (f"functions.{name}:7", name, '{"query": "x"}')
    ]


def test_a_header_that_fits_nothing_is_still_a_call(small_kimi: TiktokenTokenizer) -> None:
    answer = parse(small_kimi, section(call("call_9", '{"other": 1}')))
    assert [one.arguments for one in answer.calls] == ['{"other": 1}']
    assert answer.calls[0].name


@pytest.mark.parametrize(
    ("written", "shown", "is_valid"),
    [
        ("", "{}", True),
        ("  \n", "{}", True),
        (' {"city": "Oslo"} \n', '{"city": "Oslo"}', True),
        (json.dumps('{"city": "Oslo"}'), '{"city": "Oslo"}', True),
        (json.dumps("just text"), '"just text"', False),
        ('{"city": "Os', '{"city": "Os', False),
        ("[1]", "[1]", False),
        ("city=Oslo", "city=Oslo", False),
    ],
)
def test_arguments(small_kimi: TiktokenTokenizer, written: str, shown: str, is_valid: bool) -> None:
    answer = parse(small_kimi, section(call("functions.get_weather:0", written)))
    assert [(one.arguments, one.is_valid) for one in answer.calls] == [(shown, is_valid)]


def test_long_arguments_are_not_cut(small_kimi: TiktokenTokenizer) -> None:
    long = json.dumps({"query": "x" * 100_000})
    assert parse(small_kimi, section(call("functions.search:0", long))).calls[0].arguments == long


def test_text_around_calls(small_kimi: TiktokenTokenizer) -> None:
    inside = SECTION + "noise" + call("functions.search:0", "{}") + "noise" + END_SECTION
    assert parse(small_kimi, "\n\n" + inside).content == ""
    assert parse(small_kimi, "A\n" + inside + " \n").content == "A\n"
    assert parse(small_kimi, "A" + inside + "\nB").content == "A\nB"
    assert parse(small_kimi, "\n\n").content == "\n\n", "white space alone is an answer where no call is"


def test_stray_markers_never_show(small_kimi: TiktokenTokenizer) -> None:
    assert parse(small_kimi, "a</think>b").content == "ab"
    assert parse(small_kimi, "a" + END_CALL + ARGS + END_SECTION + "b").content == "ab"
    thought = parse(small_kimi, "<think>a</think>b", State.REASONING)
    assert (thought.reasoning, thought.content) == ("a", "b")
    again = parse(small_kimi, "<think>a</think>b", State.CONTENT)
    assert (again.reasoning, again.content) == ("a", "b"), "an Instant prompt may still be thought about"


def test_markers_as_text_are_text(small_kimi: TiktokenTokenizer) -> None:
    parser = parser_of(small_kimi, State.CONTENT, TOOLS)
    spelt = f"write {SECTION} and </think>"
    answer = Answer.of([*parser.add(small_kimi.encode_plain(spelt)), *parser.finish()])
    assert answer.content == spelt


def test_the_singular_section_marker_counts_where_tools_are_declared(small_kimi: TiktokenTokenizer) -> None:
    text = "<|tool_call_section_begin|>" + call("functions.search:0", "{}") + "<|tool_call_section_end|>after"
    answer = parse(small_kimi, "A" + text)
    assert (answer.content, len(answer.calls)) == ("Aafter", 1)
    plain = parse(small_kimi, "say <|tool_call_section_begin|>", tools=[])
    assert plain.content == "say <|tool_call_section_begin|>"


def test_an_output_that_ends_inside_a_call(small_kimi: TiktokenTokenizer) -> None:
    cut = parse(small_kimi, SECTION + CALL + "functions.search:0" + ARGS + '{"query": "a ')
    assert [(one.arguments, one.is_valid) for one in cut.calls] == [('{"query": "a', None)]
    assert parse(small_kimi, "A" + SECTION + CALL + "functions.sea") == Answer(content="A")


PIECES = st.sampled_from(
    [
        *(marker.value for marker in Marker),
        "functions.search:0",
        "get_weather",
        '{"query": "x"}',
        '"{\\"query\\": 1}"',
        "<|tool_call_section_begin|>",
        "<|tool_call_sec",
        "你好",
        "👩‍🌾",
        " ",
        "\n",
        "text",
        "<",
        "{",
    ]
)


@settings(deadline=None, max_examples=400)
@given(st.lists(PIECES, max_size=14), st.sampled_from([State.REASONING, State.CONTENT]), st.data())
def test_no_token_boundary_matters(
    small_kimi: TiktokenTokenizer, pieces: list[str], start: State, data: st.DataObject
) -> None:
    text = "".join(pieces)
    whole = parse(small_kimi, text, start)
    # the same characters in other tokens: bytes one by one, control tokens whole
    ids = [
        one
        for segment in small_kimi.specials.split(text)
        for one in (list(segment.encode()) if isinstance(segment, str) else [segment.token_id])
    ]
    assert bytes(range(256)) == b"".join(small_kimi.vocabulary.bytes_of(one) for one in range(256))
    parser = parser_of(small_kimi, start, TOOLS)
    events: list[Event] = []
    while ids:
        count = data.draw(st.integers(1, len(ids)))
        events += parser.add(ids[:count])
        ids = ids[count:]
    assert Answer.of([*events, *parser.finish()]) == whole
    for shown in (whole.reasoning, whole.content, *(one.arguments for one in whole.calls)):
        assert not any(marker.value in shown for marker in Marker)
