"""What the mesh costs: tokens/s of decode through real processes ÷ the same model in one process.

    python -m tests.bench.mesh_tax [--tokens N] [--repeats R]

Both sides decode the same prompts greedily, end tokens ignored, after a warm-up of the same shape. Mesh: one prefill
worker, one decode worker, two expert shards, one thread each, driven over gRPC by this process; tokens/s counts from
the moment when all streams decode to the last token. One process: as many threads as the machine has cores, so that
neither side has more of the machine than the other. Rounds alternate; medians are reported. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshfire import modelstore
from meshfire.client import Delta, MeshfireClient, Sampling
from meshfire.testing.in_process import InProcessModel
from tests.e2e.mesh_process import MeshProcess, start_mesh

BATCHES = (1, 8)
PROMPT_TOKENS = 64


@dataclass(frozen=True)
class Subject:
    name: str
    directory: Path
    dense_slices: int
    vocab_size: int


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tokens", type=int, default=48)
    arguments.add_argument("--repeats", type=int, default=3)
    options = arguments.parse_args()
    threads = os.cpu_count() or 1
    torch.set_num_threads(threads)
    print(f"{platform.machine()}, {threads} cores, torch {torch.__version__}")
    print(f"mesh: 1 thread per worker and shard; in process: {threads} threads")
    kimi = Subject("kimi-bench", modelstore.pull("make:kimi-bench@0"), 0, 1024)
    smollm2 = Subject("smollm2-135m-instruct", modelstore.pull("smollm2-135m-instruct"), 2, 40000)
    results = {one.name: measure(one, options.tokens, options.repeats) for one in (kimi, smollm2)}
    print(json.dumps(summary(results)))


def measure(subject: Subject, num_tokens: int, repeats: int) -> dict[int, dict[str, float]]:
    """Medians by batch."""
    found: dict[int, dict[str, float]] = {}
    alone = InProcessModel(subject.directory, dense_slices=subject.dense_slices, max_batch=max(BATCHES), max_tokens=512)
    with tempfile.TemporaryDirectory() as folder, start_mesh(topology(subject), Path(folder)) as mesh:
        for batch in BATCHES:
            rounds: dict[str, list[float]] = {"mesh": [], "inprocess": []}
            for number in range(repeats + 1):  # the first is the warm-up
                prompts = [prompt(subject, number * 100 + index) for index in range(batch)]
                tokens_in_process, speed_in_process = run_in_process(alone, prompts, num_tokens)
                tokens_in_mesh, speed_in_mesh = asyncio.run(run_in_mesh(mesh, subject.name, prompts, num_tokens))
                same = sum(a == b for a, b in zip(tokens_in_process, tokens_in_mesh))
                note = " (warm-up)" if number == 0 else ""
                speeds = f"mesh {speed_in_mesh:.1f}, in process {speed_in_process:.1f} tok/s"
                print(f"{subject.name} batch {batch}: {speeds}, {same}/{batch} outputs equal{note}", flush=True)
                if number:
                    rounds["mesh"].append(speed_in_mesh)
                    rounds["inprocess"].append(speed_in_process)
            found[batch] = {side: statistics.median(speeds) for side, speeds in rounds.items()}
            found[batch]["ratio"] = found[batch]["mesh"] / found[batch]["inprocess"]
    return found


def topology(subject: Subject) -> dict[str, Any]:
    model = {
        "model": str(subject.directory),
        "name": subject.name,
        "expert_shards": 2,
        "dense_slices": subject.dense_slices,
    }
    return {"mesh": "bench", "http_port": 0, "models": [model]}


def prompt(subject: Subject, seed: int) -> list[int]:
    return torch.randint(
        300, subject.vocab_size, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def run_in_process(model: InProcessModel, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], float]:
    steps, times = [], []
    for logits in model.logits(prompts, num_tokens):
        steps.append(logits.argmax(-1).tolist())
        times.append(time.perf_counter())
    speed = len(prompts) * (num_tokens - 1) / (times[-1] - times[0])
    return [list(column) for column in zip(*steps)], speed


async def run_in_mesh(
    mesh: MeshProcess, model: str, prompts: list[list[int]], num_tokens: int
) -> tuple[list[list[int]], float]:
    sampling = Sampling(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    times: list[float] = []

    async def stream(client: MeshfireClient, tokens: list[int]) -> list[int]:
        out: list[int] = []
        async for event in client.generate(model, tokens, sampling, timeout_s=300):
            if isinstance(event, Delta):
                out += event.token_ids
                times.extend([time.perf_counter()] * len(event.token_ids))
        return out

    async with MeshfireClient(mesh.grpc_address) as client:
        outputs = await asyncio.gather(*(stream(client, one) for one in prompts))
    # From the moment when all streams decode to the last token: prefills before it are not the step's cost.
    times.sort()
    start = len(prompts)
    return list(outputs), (len(times) - start) / (times[-1] - times[start - 1])


def summary(results: dict[str, dict[int, dict[str, float]]]) -> dict[str, Any]:
    kimi, smollm2 = results["kimi-bench"], results["smollm2-135m-instruct"]
    return {
        "model": "kimi-bench",
        "batch": list(BATCHES),
        "mesh_tok_s": [round(kimi[one]["mesh"], 2) for one in BATCHES],
        "inprocess_tok_s": [round(kimi[one]["inprocess"], 2) for one in BATCHES],
        "ratio_batch_1": round(kimi[1]["ratio"], 3),
        "ratio_batch_8": round(kimi[8]["ratio"], 3),
        "smollm2_mesh_tok_s": [round(smollm2[one]["mesh"], 2) for one in BATCHES],
        "smollm2_inprocess_tok_s": [round(smollm2[one]["inprocess"], 2) for one in BATCHES],
        "smollm2_ratio_batch_1": round(smollm2[1]["ratio"], 3),
        "smollm2_ratio_batch_8": round(smollm2[8]["ratio"], 3),
    }


if __name__ == "__main__":
    main()
