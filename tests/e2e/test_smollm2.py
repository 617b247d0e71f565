"""The real model through the real mesh answers, token for token, what `transformers` answers with the same weights."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import torch

from tests.e2e.mesh_process import MeshProcess, cached_model

PROMPTS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Count from one to ten.",
    "Why is the sky blue? Answer like a pirate 🏴‍☠️.",
    "Translate 'good morning' to Spanish, German and 日本語.",
]
NUM_TOKENS = 64


async def ask_all(mesh: MeshProcess, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """All at once: the answers share their batches."""

    async def ask(client: httpx.AsyncClient, prompt: str) -> dict[str, Any]:
        body = {
            "model": mesh.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": NUM_TOKENS,
            "return_token_ids": True,
        }
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async with httpx.AsyncClient(base_url=mesh.http_url, timeout=200, trust_env=False) as client:
        return list(await asyncio.gather(*(ask(client, prompt) for prompt in prompts)))


@pytest.mark.timeout(300)
async def test_five_chats_are_answered_token_for_token_as_by_transformers(mesh: MeshProcess) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    answers = await ask_all(mesh, PROMPTS)
    directory = cached_model("smollm2-135m-instruct")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    torch.set_num_threads(2)  # the mesh is idle while the oracle computes
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        length = ids["input_ids"].shape[1]
        expected = model.generate(**ids, max_new_tokens=NUM_TOKENS, do_sample=False)[0, length:].tolist()
        choice = answer["choices"][0]
        assert choice["prompt_token_ids"] == ids["input_ids"][0].tolist()
        assert choice["token_ids"] == expected
        assert choice["message"]["content"] == tokenizer.decode(expected, skip_special_tokens=True)
        assert answer["usage"]["completion_tokens"] == len(expected)
        assert answer["usage"]["prompt_tokens"] == length


def test_the_interactive_chat_remembers_what_was_said(mesh: MeshProcess) -> None:
    questions = "What is the capital of France?\nAnd of Spain?\n\n"
    done = mesh.cli("chat", "--temperature", "0", "--max-tokens", "16", "--stats", stdin=questions)
    assert "Paris" in done.stdout
    first, second = (int(number) for number in re.findall(r"\[(\d+) prompt tokens", done.stderr))
    assert second > first + len(["And", "of", "Spain?"]), "the second prompt holds the first turn"


def test_the_cli_chats_traces_and_tells_the_status(mesh: MeshProcess) -> None:
    done = mesh.cli("chat", "What is the capital of France?", "--temperature", "0", "--max-tokens", "24", "--stats")
    assert "Paris" in done.stdout
    trace_id = re.search(r"\[trace ([0-9a-f]{32})\]", done.stderr)
    assert trace_id, done.stderr
    for _ in range(20):
        waterfall = mesh.cli("trace", trace_id[1][:12], check=False).stdout
        if "decode.lease" in waterfall and waterfall.count("expert_shard.forward") >= 4:
            break
        time.sleep(0.5)
    for span in ("router.generate", "prefill.lease", "decode.read_kv", "decode.lease", "expert_shard.forward"):
        assert span in waterfall, waterfall
    status = json.loads(mesh.cli("status", "--json").stdout)
    assert {one["service"] for one in status["processes"]} == {
        "tokenizer", "router", "prefill", "decode", "expert_shard", "gateway"
    }  # fmt: skip
    assert all(one["pid"] and one["address"] and one["health"] == "serving" for one in status["processes"])
