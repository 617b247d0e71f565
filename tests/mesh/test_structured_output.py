"""Structured output through the whole mesh: a made model that babbles, held to rules token by token.

Judged by `jsonschema`, `json` and `re`, never by what holds the model to the rules.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import AsyncOpenAI, BadRequestError

from meshfire.client import CallsRule, ChoiceRule, Delta, FunctionRule, JsonRule, Message, OutputRule, Sampling, Tool
from meshfire.errors import BadInput
from tests.made_kimi import make_kimi
from tests.mesh.asking import ask, post, script
from tests.mesh.harness import InProcessMesh, in_process_mesh
from tests.oracles import make_llama_checkpoint

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "left": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "left", "tags"],
    "additionalProperties": False,
}
INSTANT = {"chat_template_kwargs": {"thinking": False}}
USER = [{"role": "user", "content": "7 crates, 2 lost. How many?"}]


def tool(name: str, strict: bool = False, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


WEIGH = tool("weigh", crate={"type": "integer", "minimum": 0, "maximum": 99})
OPEN = tool("open_docket", no={"type": "string", "maxLength": 4})
BY_NAME = {one["function"]["name"]: one["function"]["parameters"] for one in (WEIGH, OPEN)}


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_kimi(tmp_path_factory.mktemp("kimi") / "model")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_checkpoint(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture
async def mesh(kimi: Path, llama: Path) -> AsyncIterator[InProcessMesh]:
    async with in_process_mesh({"m": kimi, "llama": llama}, test_hooks=True, expert_shards=0) as mesh:
        yield mesh


async def chat(mesh: InProcessMesh, *, headers: dict[str, str] | None = None, **request: Any) -> Any:
    """The same request whole and streamed: they say the same. Returns the whole answer's choice."""
    async with AsyncOpenAI(base_url=f"{mesh.http_url}/v1", api_key="-", max_retries=0) as client:
        body = {"messages": USER, "max_tokens": 400, "seed": 7} | request
        extra = body.pop("extra_body", {})
        whole = await client.chat.completions.create(model="m", extra_headers=headers, extra_body=extra, **body)
        content, arguments, reason = "", dict[int, str](), None
        async for chunk in await client.chat.completions.create(
            model="m", extra_headers=headers, extra_body=extra, stream=True, **body
        ):
            for one in chunk.choices:
                content += one.delta.content or ""
                reason = one.finish_reason or reason
                for call in one.delta.tool_calls or ():
                    arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    choice = whole.choices[0]
    calls = [one.function.arguments for one in choice.message.tool_calls or ()]
    assert (content, list(arguments.values()), reason) == (choice.message.content or "", calls, choice.finish_reason)
    return choice


async def test_a_babbling_model_fits_the_schema(mesh: InProcessMesh) -> None:
    wrapped = {"name": "r", "strict": True, "schema": SCHEMA}
    bare = {**SCHEMA, "title": "r", "description": "bare"}
    for seed, asked in enumerate(
        [
            {"response_format": {"type": "json_schema", "json_schema": wrapped}},
            {"response_format": {"type": "json_schema", "json_schema": bare}},
            {"guided_json": SCHEMA},
            {"guided_json": json.dumps(SCHEMA)},
            {"structured_outputs": {"json": SCHEMA}},
        ]
    ):
        choice = await chat(mesh, extra_body=INSTANT | asked, seed=seed, temperature=1.5)
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        assert choice.finish_reason == "stop"


async def test_regex_choice_grammar_and_any_object(mesh: InProcessMesh) -> None:
    regex = await chat(mesh, extra_body=INSTANT | {"guided_regex": r"^[a-c]{2}-\d{3}$"})
    assert re.fullmatch(r"[a-c]{2}-\d{3}", regex.message.content)
    options = ["yes", "no", "维也纳 🦫"]
    assert (await chat(mesh, extra_body=INSTANT | {"guided_choice": options})).message.content in options
    lark = 'start: "a" b "c"\nb: "x" | "y"\n'
    assert (await chat(mesh, extra_body=INSTANT | {"guided_grammar": lark})).message.content in ("axc", "ayc")
    gbnf = 'root ::= "q" [0-9] "!"'
    assert re.fullmatch(r"q\d!", (await chat(mesh, extra_body=INSTANT | {"guided_grammar": gbnf})).message.content)
    some = await chat(mesh, extra_body=INSTANT, response_format={"type": "json_object"}, max_tokens=60, seed=1)
    assert some.message.content.lstrip().startswith("{")
    assert some.finish_reason == "length" or isinstance(json.loads(some.message.content), dict)


async def test_completions_and_other_vocabularies(mesh: InProcessMesh) -> None:
    for model, prompt in (("m", "x"), ("m", [65, 66]), ("llama", "once")):
        body = {"model": model, "prompt": prompt, "max_tokens": 200, "guided_json": SCHEMA, "seed": 3}
        answer = await post(mesh, "/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        jsonschema.validate(json.loads(answer.json()["choices"][0]["text"]), SCHEMA)
    body = {"model": "llama", "messages": USER, "max_tokens": 200, "guided_choice": ["left", "right"]}
    answer = await post(mesh, "/v1/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["content"] in ("left", "right")


async def test_required_calls_are_declared_and_fit(mesh: InProcessMesh) -> None:
    for seed in range(3):
        choice = await chat(mesh, tools=[WEIGH, OPEN], tool_choice="required", seed=seed, extra_body=INSTANT)
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert choice.message.tool_calls
        for index, call in enumerate(choice.message.tool_calls):
            assert call.id == f"functions.{call.function.name}:{index}"
            jsonschema.validate(json.loads(call.function.arguments), BY_NAME[call.function.name])


async def test_named_and_allowed_functions(mesh: InProcessMesh) -> None:
    named = {"type": "function", "function": {"name": "open_docket"}}
    for choice_asked in (
        named,
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}},
    ):
        for seed in range(3):
            choice = await chat(
                mesh,
                tools=[WEIGH, OPEN],
                tool_choice=choice_asked,
                parallel_tool_calls=False,
                seed=seed,
                extra_body=INSTANT,
            )
            assert [one.function.name for one in choice.message.tool_calls] == ["open_docket"]
            assert choice.finish_reason == "tool_calls"


async def ids_of(mesh: InProcessMesh, *pieces: str) -> dict[str, int]:
    """Token ids of control tokens."""
    body = {"model": "m", "messages": USER, "return_token_ids": True}
    headers = script(pieces=list(pieces), end="length")
    answer = await post(mesh, "/v1/chat/completions", json=body, headers=headers)
    return dict(zip(pieces, answer.json()["choices"][0]["token_ids"], strict=True))


async def test_no_calls_where_none_are_wanted(mesh: InProcessMesh) -> None:
    """A model that likes to call whenever it may."""
    begin = await ids_of(mesh, "<|tool_calls_section_begin|>")
    likes = {str(one): 100.0 for one in begin.values()}
    free = await chat(mesh, tools=[WEIGH], tool_choice="auto", logit_bias=likes, extra_body=INSTANT)
    assert [one.function.name for one in free.message.tool_calls][:1] == ["weigh"]
    bound = await chat(mesh, tools=[WEIGH], tool_choice="none", logit_bias=likes, max_tokens=30, extra_body=INSTANT)
    assert not bound.message.tool_calls


async def test_the_reasoning_is_free_and_the_answer_is_bound(mesh: InProcessMesh) -> None:
    rule = {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}}
    cut = await chat(mesh, max_tokens=4, **rule)
    assert (cut.message.content or "", cut.finish_reason) == ("", "length")
    end = await ids_of(mesh, "</think>", "<|im_end|>")
    # The end of the turn is liked best, and not allowed before the answer is there.
    likes = {str(end["</think>"]): 40.0, str(end["<|im_end|>"]): 80.0}
    thought = await chat(mesh, logit_bias=likes, **rule)
    jsonschema.validate(json.loads(thought.message.content), SCHEMA)
    called = await chat(mesh, logit_bias=likes, tools=[WEIGH], tool_choice="required")
    jsonschema.validate(json.loads(called.message.tool_calls[0].function.arguments), BY_NAME["weigh"])


LEFT = {
    "type": "object",
    "properties": {"left": {"type": "integer"}},
    "required": ["left"],
    "additionalProperties": False,
}


async def test_the_schema_covers_exactly_the_content(mesh: InProcessMesh) -> None:
    """A model that wants to say what it thinks first: with thinking, without, and cut short while it thinks."""
    schema = {"name": "r", "strict": True, "schema": LEFT}
    rule = {"response_format": {"type": "json_schema", "json_schema": schema}}
    answer, thought = '{"left":5}', "Seven minus two is five."
    thinking = await chat(mesh, headers=script(wants=f"{thought}</think>{answer}"), **rule)
    assert (thinking.message.reasoning_content, thinking.message.content) == (thought, answer)
    instant = await chat(mesh, headers=script(wants=answer), extra_body=INSTANT, **rule)
    assert (getattr(instant.message, "reasoning_content", None) or "", instant.message.content) == ("", answer)
    cut = await chat(mesh, headers=script(wants=f"{thought}</think>{answer}", end="length"), max_tokens=4, **rule)
    assert (cut.message.content or "", cut.finish_reason) == ("", "length")


async def test_who_wants_to_chat_must_call_or_fit(mesh: InProcessMesh) -> None:
    wishes = script(wants="Sure! Here is what I found: nothing.")
    forced = await chat(mesh, headers=wishes, tools=[WEIGH], tool_choice="required", extra_body=INSTANT)
    jsonschema.validate(json.loads(forced.message.tool_calls[0].function.arguments), BY_NAME["weigh"])
    assert (forced.finish_reason, forced.message.content) == ("tool_calls", None)
    chosen = await chat(mesh, headers=wishes, extra_body=INSTANT | {"guided_choice": ["left", "right"]})
    assert chosen.message.content in ("left", "right")
    free = await chat(mesh, headers=wishes, tools=[WEIGH], extra_body=INSTANT)
    assert (free.message.content, free.finish_reason) == ("Sure! Here is what I found: nothing.", "stop")


async def test_who_wants_an_undeclared_tool_gets_a_declared_one(mesh: InProcessMesh) -> None:
    wishes = script(
        wants="<|tool_calls_section_begin|><|tool_call_begin|>functions.fly:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    for tool_choice in ("auto", "required"):
        choice = await chat(mesh, headers=wishes, tools=[WEIGH], tool_choice=tool_choice, extra_body=INSTANT)
        assert [one.function.name for one in choice.message.tool_calls] == ["weigh"]
        jsonschema.validate(json.loads(choice.message.tool_calls[0].function.arguments), BY_NAME["weigh"])
    none = await chat(mesh, headers=wishes, tools=[WEIGH], tool_choice="none", max_tokens=40, extra_body=INSTANT)
    assert (none.message.tool_calls, none.finish_reason) == (None, "length")


async def test_scripts_may_break_rules(mesh: InProcessMesh) -> None:
    """What a checkpoint writes against the rule must still be tried on the parsers."""
    pieces = ["<|tool_calls_section_begin|>", "<|tool_call_begin|>weigh<|tool_call_argument_begin|>", "{}"]
    pieces += ["<|tool_call_end|>", "<|tool_calls_section_end|>"]
    choice = await chat(mesh, headers=script(pieces=pieces), tools=[WEIGH], extra_body=INSTANT)
    assert [one.function.name for one in choice.message.tool_calls] == ["weigh"]


def coded(pattern: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"code": {"type": "string", "pattern": pattern}}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "strict": True, "schema": schema}}}


BAD_REQUESTS: list[tuple[dict[str, Any], str, str]] = [
    (coded("([a-z"), "response_format", "properties.code.pattern"),
    (coded(r"^(\w{2})-\1$"), "response_format", "properties.code.pattern"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}},
        "response_format",
        "uniqueItems",
    ),
    ({"extra_body": {"guided_json": {"$ref": "#"}}}, "guided_json", "no text fits"),
    ({"extra_body": {"guided_json": "{"}}, "guided_json", "no JSON"),
    ({"extra_body": {"guided_regex": "("}}, "guided_regex", "regex"),
    ({"extra_body": {"guided_grammar": "start: nowhere"}}, "guided_grammar", "nowhere"),
    (
        {"tools": [tool("f", strict=True, x={"type": "string", "pattern": "("})]},
        "tools[0].function.parameters.properties.x.pattern",
        "pattern",
    ),
    ({"tools": [WEIGH], "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice", "'fly'"),
    ({"tool_choice": "required"}, "tool_choice", "no tool"),
    ({"tools": [WEIGH], "extra_body": {"guided_grammar": 'start: "a"'}}, "guided_grammar", "tools"),
    ({"extra_body": {"guided_regex": "a", "ignore_eos": True}}, "ignore_eos", "complete"),
]


async def test_what_cannot_be_enforced_is_refused_by_name(mesh: InProcessMesh) -> None:
    async with AsyncOpenAI(base_url=f"{mesh.http_url}/v1", api_key="-", max_retries=0) as client:
        for request, param, words in BAD_REQUESTS:
            for stream in (False, True):
                with pytest.raises(BadRequestError) as caught:
                    await client.chat.completions.create(
                        model="m", messages=USER, max_tokens=5, stream=stream, **request
                    )
                assert caught.value.status_code == 400
                assert (caught.value.param, words in caught.value.message) == (param, True), caught.value.message
        after = await client.chat.completions.create(model="m", messages=USER, max_tokens=2)
    assert after.choices, "no worker died"


async def test_a_loose_tool_with_an_odd_schema_takes_any_object(mesh: InProcessMesh) -> None:
    odd = tool("f", x={"type": "array", "uniqueItems": True})
    begin = await ids_of(mesh, "<|tool_calls_section_begin|>", "<|tool_call_end|>")
    likes = {str(one): 100.0 for one in (*begin.values(), ord("}"))}
    choice = await chat(mesh, tools=[odd], tool_choice="required", logit_bias=likes, extra_body=INSTANT)
    assert isinstance(json.loads(choice.message.tool_calls[0].function.arguments), dict)


async def test_rules_over_grpc(mesh: InProcessMesh) -> None:
    prompt, sampling = [Message("user", "x")], Sampling(max_tokens=200, seed=2)

    async def text(**request: Any) -> str:
        events = mesh.client.generate("m", prompt, sampling, thinking=False, **request)
        return "".join([one.text async for one in events if isinstance(one, Delta)])

    jsonschema.validate(json.loads(await text(rule=OutputRule(JsonRule(SCHEMA)))), SCHEMA)
    assert await text(rule=OutputRule(ChoiceRule(("left", "right")))) in ("left", "right")
    tools = [Tool(name, parameters=parameters) for name, parameters in BY_NAME.items()]
    rule = OutputRule(calls=CallsRule("required", (FunctionRule("weigh"),), parallel=False))
    events = [one async for one in mesh.client.generate("m", prompt, sampling, thinking=False, tools=tools, rule=rule)]
    calls = [part for one in events if isinstance(one, Delta) for part in one.tool_calls]
    assert {one.name for one in calls if one.name} == {"weigh"}
    jsonschema.validate(json.loads("".join(one.arguments for one in calls)), BY_NAME["weigh"])
    with pytest.raises(BadInput) as caught:
        await text(rule=OutputRule(JsonRule({"uniqueItems": True, "type": "array"})))
    assert caught.value.field == "rule.content.json_schema.uniqueItems"


async def test_neighbours_and_rules_change_nothing_for_each_other(mesh: InProcessMesh) -> None:
    """The same seeded request alone and in a batch with free and bound ones."""
    greedy = Sampling(max_tokens=30, temperature=0, ignore_eos=True)
    rule = OutputRule(JsonRule(SCHEMA))

    async def bound(seed: int) -> list[int]:
        events = mesh.client.generate("m", "once", Sampling(max_tokens=200, seed=seed), rule=rule)
        return [token async for one in events if isinstance(one, Delta) for token in one.token_ids]

    alone = [await bound(seed) for seed in range(4)]
    free = (await ask(mesh, "once", greedy)).token_ids
    together = await asyncio.gather(*(bound(seed) for seed in range(4)), *(ask(mesh, "once", greedy) for _ in range(3)))
    assert list(together[:4]) == alone
    assert all(one.token_ids == free for one in together[4:])
