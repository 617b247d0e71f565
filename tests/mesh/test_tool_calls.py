"""Tool calls and reasoning through the whole mesh, as OpenAI's SDK sees them; outputs are scripted token by token."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from meshfire.client import Message, Sampling, Tool, ToolCall
from tests.made_kimi import make_kimi
from tests.mesh.asking import script
from tests.mesh.harness import InProcessMesh, in_process_mesh

SECTION, END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
ARGS, END_CALL = "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def call(header: str) -> str:
    return f"<|tool_call_begin|>{header}{ARGS}"


def function(name: str, **properties: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


WEIGH, OPEN = function("weigh", crate="integer"), function("open_docket", no="string")
PARALLEL = [
    "</think>",
    SECTION,
    *(
        piece
        for index, crate in enumerate((5, 6, 7))
        for piece in (call(f"functions.weigh:{index}"), '{"crate"', f":{crate}}}", END_CALL)
    ),
    END_SECTION,
    "<|im_end|>",
]
INSIDE = [
    "Need the docket first. ",
    SECTION,
    call("functions.open_docket:0") + '{"no":',
    '"880-B"}',
    END_CALL,
    END_SECTION,
    "<|im_end|>",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_kimi(tmp_path_factory.mktemp("kimi") / "model")


@pytest.fixture
async def mesh(directory: Path) -> AsyncIterator[InProcessMesh]:
    async with in_process_mesh({"m": directory}, test_hooks=True, expert_shards=1) as mesh:
        yield mesh


class Joined:
    """A streamed chat as a client that merges by index has it."""

    def __init__(self) -> None:
        self.reasoning, self.content, self.calls, self.finish_reason = "", "", dict[int, dict[str, str]](), ""

    def add(self, chunk: Any) -> None:
        for choice in chunk.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
            self.content += choice.delta.content or ""
            self.reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for part in choice.delta.tool_calls or ():
                if part.index not in self.calls:
                    assert part.index == len(self.calls)
                    assert part.id
                    assert (part.type, bool(part.function.name)) == ("function", True)
                    self.calls[part.index] = {"id": part.id, "name": part.function.name, "arguments": ""}
                else:
                    assert (part.id, part.function.name) == (None, None), "id and name come once"
                self.calls[part.index]["arguments"] += part.function.arguments or ""


async def both_ways(mesh: InProcessMesh, pieces: Sequence[str], **request: Any) -> tuple[Joined, Any]:
    """The same request streamed and whole; what they say is the same."""
    async with AsyncOpenAI(base_url=f"{mesh.http_url}/v1", api_key="-", max_retries=0) as client:
        headers = script(pieces=list(pieces), end="eos")
        whole = await client.chat.completions.create(model="m", extra_headers=headers, **request)
        joined = Joined()
        async for chunk in await client.chat.completions.create(
            model="m", extra_headers=headers, stream=True, **request
        ):
            joined.add(chunk)
    message, choice = whole.choices[0].message, whole.choices[0]
    assert joined.finish_reason == choice.finish_reason
    assert joined.content == (message.content or "")
    assert joined.reasoning == (getattr(message, "reasoning_content", None) or "")
    assert list(joined.calls.values()) == [
        {"id": one.id, "name": one.function.name, "arguments": one.function.arguments}
        for one in message.tool_calls or ()
    ]
    return joined, whole


async def test_parallel_calls_keep_their_index(mesh: InProcessMesh) -> None:
    joined, whole = await both_ways(
        mesh, PARALLEL, messages=[{"role": "user", "content": "Weigh crates 5, 6 and 7."}], tools=[WEIGH]
    )
    assert [json.loads(one["arguments"]) for one in joined.calls.values()] == [{"crate": one} for one in (5, 6, 7)]
    assert len({one["id"] for one in joined.calls.values()}) == 3
    assert joined.finish_reason == "tool_calls"
    assert whole.choices[0].message.content is None
    assert whole.usage.completion_tokens_details.reasoning_tokens == 1, "only </think>"


@pytest.mark.parametrize("with_history", [False, True])
async def test_a_section_inside_the_reasoning_is_a_call(mesh: InProcessMesh, with_history: bool) -> None:
    history: list[dict[str, Any]] = []
    if with_history:
        earlier = {"id": "call_x", "type": "function", "function": {"name": "open_docket", "arguments": '{"no": "1"}'}}
        history = [
            {"role": "user", "content": "Open docket 1."},
            {"role": "assistant", "content": None, "tool_calls": [earlier]},
            {"role": "tool", "tool_call_id": "call_x", "content": "open"},
        ]
    messages = [*history, {"role": "user", "content": "Open docket 880-B."}]
    joined, _ = await both_ways(mesh, INSIDE, messages=messages, tools=[OPEN])
    assert joined.reasoning == "Need the docket first."
    assert joined.content == ""
    assert [(one["id"], one["name"], json.loads(one["arguments"])) for one in joined.calls.values()] == [
        (f"functions.open_docket:{int(with_history)}", "open_docket", {"no": "880-B"})
    ]
    assert joined.finish_reason == "tool_calls"


async def test_content_null_and_parts_render_alike(mesh: InProcessMesh) -> None:
    made = {"id": "c", "type": "function", "function": {"name": "open_docket", "arguments": "{}"}}
    answers = []
    for content, result in (
        (None, "done"),
        ("", "done"),
        (None, [{"type": "text", "text": "do"}, {"type": "text", "text": "ne"}]),
    ):
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": content, "tool_calls": [made]},
            {"role": "tool", "tool_call_id": "c", "content": result},
        ]
        async with AsyncOpenAI(base_url=f"{mesh.http_url}/v1", api_key="-", max_retries=0) as client:
            answer = await client.chat.completions.create(
                model="m", messages=messages, tools=[OPEN], max_tokens=1, temperature=0, logprobs=True
            )
        answers.append((answer.usage.prompt_tokens, answer.choices[0].logprobs.content[0].logprob))
    assert len(set(answers)) == 1


async def test_thinking_can_be_switched_off_in_every_spelling(mesh: InProcessMesh) -> None:
    pieces = ["plain", "<|im_end|>"]
    messages = [{"role": "user", "content": "x"}]
    thinking, _ = await both_ways(mesh, pieces, messages=messages)
    assert (thinking.reasoning, thinking.content) == ("plain", "")
    for body in ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"thinking": False}}):
        instant, _ = await both_ways(mesh, pieces, messages=messages, extra_body=body)
        assert (instant.reasoning, instant.content) == ("", "plain")


async def test_tools_over_grpc(mesh: InProcessMesh) -> None:
    tool = Tool("weigh", "Weigh.", {"type": "object", "properties": {"crate": {"type": "integer"}}})
    earlier = Message("assistant", "", tool_calls=[ToolCall("a", "weigh", "{}")])
    prompt = [Message("user", "x"), earlier, Message("tool", "5 kg", tool_call_id="a")]
    events = [
        one
        async for one in mesh.client.generate(
            "m", prompt, Sampling(temperature=0), tools=[tool], metadata=script(pieces=PARALLEL, end="eos")
        )
    ]
    calls = [part for one in events for part in getattr(one, "tool_calls", ())]
    assert [one.id for one in calls if one.id] == [f"functions.weigh:{index}" for index in (1, 2, 3)]
    assert "".join(one.arguments for one in calls if one.index == 2) == '{"crate":7}'
    assert events[-1].finish_reason == "tool_calls"  # type: ignore[union-attr]
