"""What rules for outputs cost: masks over 163,840 tokens, and a decode step with masks against the same step without.

    python -m tests.bench.constrained [--steps N]

Masks: documents are walked token by token under a schema, a regular expression, and required tool calls. Steps: the
made model kimi-bench in this process, its head repeated to the vocabulary's width, so a step is shorter than with a
real head; bound and free steps take turns, masks come from the decode worker's own thread. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshfire import modelstore
from meshfire.grammar.compiler import GrammarCompiler
from meshfire.grammar.constraint import Constraint
from meshfire.grammar.rules import CallsRule, FunctionRule, JsonRule, OutputRule, RegexRule
from meshfire.model.sampling import SamplingParams, SamplingRow, sample
from meshfire.testing.in_process import InProcessModel
from meshfire.text.tokenizer import Tokenizer
from services.decode.rules import OutputRuler, RuleBook
from tests.bench._kimi_vocabulary import kimi_or_made

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
        "kind": {"enum": ["engineer", "writer", "other"]},
    },
    "required": ["name", "age", "tags", "address", "kind"],
    "additionalProperties": False,
}
DOCUMENT = json.dumps(
    {
        "name": "Ada Lovelace, who wrote the first notes on the engine",
        "age": 36,
        "tags": ["mathematics", "poetical science", "the analytical engine", "translation"],
        "address": {"street": "12 St James's Square, London", "zip": "12345"},
        "kind": "writer",
    }
)
WEATHER = FunctionRule(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
CALLS = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Llanfairpwllgwyngyll", "unit": "c"}<|tool_call_end|><|tool_calls_section_end|>'
)
MADE_VOCABULARY = 8192  # of kimi-bench
GREEDY = SamplingParams(temperature=0.0, seed=1)
WARM = SamplingParams(temperature=0.7, top_p=0.95, seed=1)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=60)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    tokenizer, kind = kimi_or_made()
    print(f"{platform.machine()}, one thread, {kind} vocabulary of {tokenizer.vocabulary.size}")
    started = time.perf_counter()
    compiler = GrammarCompiler(tokenizer)
    compiler.warm_up()
    print(f"vocabulary prepared in {time.perf_counter() - started:.2f} s")
    masks = mask_times(compiler, tokenizer)
    overheads = step_overheads(compiler, tokenizer, options.steps)
    summary = {
        "mask_p50_us": round(statistics.median(masks), 1),
        "mask_p99_us": round(statistics.quantiles(masks, n=100)[98], 1),
        "tpot_overhead": round(max(overheads.values()), 4),
        "vocab": tokenizer.vocabulary.size,
        "vocabulary": kind,
        "tpot_overheads": {name: round(value, 4) for name, value in overheads.items()},
    }
    print(json.dumps(summary))


def mask_times(compiler: GrammarCompiler, tokenizer: Tokenizer) -> list[float]:
    """Microseconds of every mask; each rule is new, so first masks are among them."""
    subjects = [(OutputRule(JsonRule(PERSON)), DOCUMENT), (OutputRule(RegexRule("([a-z]+ ){20}")), "word " * 20)]
    if compiler.speaks_kimi:
        subjects.append((OutputRule(calls=CallsRule("required", (WEATHER,))), CALLS))
    found: list[float] = []
    for rule, text in subjects:
        started = time.perf_counter()
        program = compiler.compile(rule)
        compiled_us = (time.perf_counter() - started) * 1e6
        own = [one for _ in range(20) for one in walk(Constraint(program, in_reasoning=False), tokenizer, text)]
        name = type(rule.content or rule.calls).__name__
        print(f"{name}: compiled in {compiled_us:.0f} us, mask p50 {statistics.median(own):.1f} us")
        found += own
    return found


def walk(under: Constraint, tokenizer: Tokenizer, text: str) -> Iterator[float]:
    for token_id in tokenizer.encode_trusted(text):
        started = time.perf_counter()
        under.mask()
        yield (time.perf_counter() - started) * 1e6
        under.accept(token_id)


def step_overheads(compiler: GrammarCompiler, tokenizer: Tokenizer, num_steps: int) -> dict[str, float]:
    """By batch and temperature: what a bound step takes beyond a free one, over the free one."""
    found: dict[str, float] = {}
    directory = modelstore.pull("make:kimi-bench@0")
    model = InProcessModel(directory, max_batch=8, max_tokens=512)
    for batch in (1, 8):
        for name, params in (("greedy", GREEDY), ("warm", WARM)):
            times = asyncio.run(steps(model, compiler, tokenizer, batch, params, num_steps))
            free, bound = (statistics.median(times[kind]) for kind in (False, True))
            found[f"batch_{batch}_{name}"] = extra(times[False], times[True]) / free
            print(f"batch {batch} {name}: free {free * 1e3:.2f} ms, bound {bound * 1e3:.2f} ms a step", flush=True)
    return found


def extra(free: Sequence[float], bound: Sequence[float]) -> float:
    """Seconds that a bound step takes beyond its two free neighbours: the machine's drift is in both."""
    pairs = zip(bound, itertools.pairwise(free))
    return statistics.median(one - (before + after) / 2 for one, (before, after) in pairs)


async def steps(
    model: InProcessModel,
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    batch: int,
    params: SamplingParams,
    num_steps: int,
) -> dict[bool, list[float]]:
    """Seconds of each step, by whether it is bound; the two take turns."""
    book = RuleBook(compiler)
    try:
        rulers = [
            await book.open(OutputRule(JsonRule(PERSON)), in_reasoning=False, may_break=False) for _ in range(batch)
        ]
        document = tokenizer.encode_plain(DOCUMENT)
        prompts = [torch.randint(300, MADE_VOCABULARY, (64,)).tolist() for _ in range(batch)]
        logits = model.logits(prompts, 2 * num_steps + 2)
        next(logits)
        times: dict[bool, list[float]] = {False: [], True: []}
        for index in range(2 * num_steps + 1):
            bound = index % 2 == 1
            said = document[: (index // 2) % len(document)]
            started = time.perf_counter()
            step(logits, rulers if bound else [], said, params, batch, tokenizer.vocabulary.size)
            times[bound].append(time.perf_counter() - started)
            if len(said) + 1 == len(document):
                rulers = [
                    await book.open(OutputRule(JsonRule(PERSON)), in_reasoning=False, may_break=False)
                    for _ in range(batch)
                ]
        return times
    finally:
        book.close()


def step(
    logits: Iterator[Tensor],
    rulers: Sequence[OutputRuler],
    said: Sequence[int],
    params: SamplingParams,
    batch: int,
    vocab_size: int,
) -> None:
    """As a decode worker's: masks are asked for, the model runs, masks are waited for, tokens are chosen."""
    masks = [ruler.next_mask(said) for ruler in rulers]
    wide = next(logits).repeat(1, -(-vocab_size // MADE_VOCABULARY))[:, :vocab_size]
    rows = [SamplingRow(params, 70, (), ()) for _ in range(batch)]
    sample(wide, [replace(row, allowed=mask.result()) for row, mask in zip(rows, masks)] or rows)


if __name__ == "__main__":
    main()
