"""A model alone in this process: `python -m tests.bench.in_process [--model DIR] [--compute fp32 int8] [--threads 2]`.

Load time, greedy decode at batches 1, 8 and 32 after 110-token prompts (median step), prefill of 1,024 tokens. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from meshfire.cache_dir import cache_dir
from meshfire.kernels.native import kernels
from meshfire.testing.in_process import InProcessModel

BATCHES = (1, 8, 32)
PROMPT_TOKENS = 110
PREFILL_TOKENS = 1024
NUM_STEPS = 30


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(0, 1024, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def decode_rate(model: InProcessModel, batch: int) -> float:
    """Tokens per second of the median step, the prompts' own step left out."""
    steps = model.logits([prompt_of(PROMPT_TOKENS, seed) for seed in range(batch)], NUM_STEPS)
    next(steps)
    times = []
    for _ in range(NUM_STEPS - 1):
        began = time.perf_counter()
        next(steps)
        times.append(time.perf_counter() - began)
    return round(batch / statistics.median(times), 1)


def prefill_rate(model: InProcessModel) -> float:
    times = []
    for seed in range(3):
        began = time.perf_counter()
        next(model.logits([prompt_of(PREFILL_TOKENS, seed)], 1))
        times.append(time.perf_counter() - began)
    return round(PREFILL_TOKENS / min(times), 1)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=cache_dir() / "models" / "smollm2-135m-instruct")
    parser.add_argument("--compute", nargs="+", default=["fp32", "int8"])
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    arguments = parser.parse_args()
    results = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        kernels().set_threads(threads)
        for compute in arguments.compute:
            began = time.perf_counter()
            model = InProcessModel(arguments.model, max_batch=max(BATCHES), max_tokens=1200, compute=compute)
            found: dict[str, object] = {"compute": compute, "threads": threads}
            found["load_s"] = round(time.perf_counter() - began, 2)
            found |= {f"decode_{batch}": decode_rate(model, batch) for batch in BATCHES}
            found["prefill"] = prefill_rate(model)
            results.append(found)
            print(found, flush=True)
    print(json.dumps({"bench": "in-process", "kernels": kernels().describe(), "results": results}))


if __name__ == "__main__":
    main()
