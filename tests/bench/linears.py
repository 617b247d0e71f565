"""Candidates for a linear layer on a CPU: `python -m tests.bench.linears [--threads 1 2] [--rows 1 8 32 512]`.

Shapes are SmolLM2-135M's. Each candidate is timed (best of several runs), compared with the float64 product (`error`:
norm of the difference ÷ norm) and asked whether a row has the same bits alone as among others (`row_exact`). The last
line is one JSON object; above it, microseconds as a table.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from meshfire.cache_dir import cache_dir
from meshfire.kernels import int8, native
from meshfire.kernels.build import build
from meshfire.kernels.int8_pack import pack
from meshfire.model import linear as fp32

SHAPES = {"qkv": (576, 960), "out": (576, 576), "gate+up": (576, 3072), "down": (1536, 576), "head": (576, 49152)}
MIN_RUN_S = 0.02
NUM_RUNS = 4
Product = Callable[[Tensor], Tensor]


def torch_plain(weight: Tensor) -> Product:
    return lambda rows: torch.nn.functional.linear(rows, weight)


def onednn_packed(weight: Tensor) -> Product:
    packed = fp32.pack(weight)
    return lambda rows: fp32.linear(rows, packed)


def quantized(engine: str) -> Callable[[Tensor], Product]:
    """Torch's dynamically quantized linear: 8-bit activations with one scale for all rows of a call."""

    def make(weight: Tensor) -> Product:
        torch.backends.quantized.engine = engine
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight.data = weight
        model = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(layer), {torch.nn.Linear}, torch.qint8)
        return lambda rows: model(rows)

    return make


def ours(flags: tuple[str, ...]) -> Callable[[Tensor], Product]:
    compiled = native.kernels() if not flags else native.load(build(Path(cache_dir(), "kernels"), flags))

    def make(weight: Tensor) -> Product:
        compiled.set_threads(torch.get_num_threads())
        return int8.linear(compiled.library, pack(compiled.library, weight), None)

    return make


def candidates() -> dict[str, Callable[[Tensor], Product]]:
    found = {"torch fp32": torch_plain, "oneDNN fp32, packed": onednn_packed}
    for engine, name in (("fbgemm", "FBGEMM int8"), ("onednn", "oneDNN int8")):
        if engine in torch.backends.quantized.supported_engines:
            found[name] = quantized(engine)
    if native.kernels().library:
        found[f"ours int8, {native.kernels().level}"] = ours(())
        if native.kernels().level != "avx2":
            found["ours int8, avx2"] = ours(("-mno-avx512f",))
    return found


def best_us(product: Product, rows: Tensor) -> float:
    product(rows)
    best, count = float("inf"), 1
    for _ in range(NUM_RUNS):
        while True:
            began = time.perf_counter()
            for _ in range(count):
                product(rows)
            spent = time.perf_counter() - began
            if spent >= MIN_RUN_S:
                break
            count *= 2
        best = min(best, spent / count)
    return round(best * 1e6, 1)


def measure(make: Callable[[Tensor], Product], shape: tuple[int, int], counts: list[int]) -> dict[str, object]:
    seeded = torch.Generator().manual_seed(1)
    weight = torch.randn(shape[1], shape[0], generator=seeded)
    rows = torch.randn(max(counts), shape[0], generator=seeded) * torch.rand(max(counts), 1, generator=seeded).exp()
    product = make(weight)
    exact = rows[:8].double() @ weight.double().T
    alone = torch.cat([product(row[None]) for row in rows[:8]])
    return {
        "us": {count: best_us(product, rows[:count]) for count in counts},
        "error": float((alone - exact).norm() / exact.norm()),
        "row_exact": all(torch.equal(product(rows[:count])[:8], alone[:count]) for count in counts),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 512])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # torch announces the end of its eager quantization
    results = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for shape_name, shape in SHAPES.items():
            for name, make in candidates().items():
                found = measure(make, shape, arguments.rows)
                results.append({"threads": threads, "layer": shape_name, "candidate": name, **found})
                times = " ".join(f"{one:>10}" for one in found["us"].values())  # type: ignore[attr-defined]
                print(
                    f"{threads} {shape_name:8} {name:26} {times}  {found['error']:.1e} {found['row_exact']}", flush=True
                )
    print(json.dumps({"bench": "linears", "torch": torch.__version__, "results": results}))


if __name__ == "__main__":
    main()
