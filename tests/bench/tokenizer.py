"""Encoding with Kimi's vocabulary: Meshfire's tokenizer against the bare tiktoken library, one thread.

    python -m tests.bench.tokenizer [--repeats N]

Texts: English, code, Chinese, and all mixed; short ones (a chat turn) and long ones. The two take turns, best of the
repeats; both give the same ids, which is checked. Needs Kimi's tokenizer files. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable

from meshfire.text.tiktoken_tokenizer import TiktokenTokenizer
from tests.bench._kimi_vocabulary import kimi_directory

ENGLISH = "The quick brown fox, who doesn't care, jumped over 1,234 lazy dogs; nobody wrote it down. "
CODE = "def f(items: list[int]) -> dict[str, float]:\n    return {str(k): v / 2 for k, v in enumerate(items)}\n\n"
CHINESE = "今天天气很好，我们去公园散步，然后在河边喝茶。人工智能模型正在改变世界。\n"
OTHERS = "Zwölf Boxkämpfer jagen Viktor. Привет, мир! 한국어 문장입니다. مرحبا بالعالم 🦫👩‍🌾 "
TEXTS = {"english": ENGLISH, "code": CODE, "chinese": CHINESE, "mixed": ENGLISH + CODE + CHINESE + OTHERS}
SIZES = {"turn": 500, "page": 8_000, "book": 400_000}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--repeats", type=int, default=7)
    repeats = arguments.parse_args().repeats
    directory = kimi_directory()
    if directory is None:
        raise SystemExit("Kimi's tokenizer files are not there; set MESHFIRE_KIMI_DIR to a folder with tiktoken.model")
    tokenizer = TiktokenTokenizer.load(directory)
    print(f"{platform.machine()}, one thread")
    ratios: dict[str, float] = {}
    speeds: dict[str, float] = {}
    for name, text in TEXTS.items():
        for size_name, size in SIZES.items():
            sample = (text * (size // len(text) + 1))[:size]
            assert tokenizer.encode_plain(sample) == tokenizer.library.encode_ordinary(sample)
            ours, bare = measure(tokenizer.encode_plain, tokenizer.library.encode_ordinary, sample, repeats)
            case = f"{name}_{size_name}"
            ratios[case], speeds[case] = round(ours / bare, 3), round(len(sample.encode()) / ours / 1e6, 2)
            print(f"{case}: {ours * 1e6:.0f} us, tiktoken {bare * 1e6:.0f} us, {speeds[case]} MB/s", flush=True)
    print(json.dumps({"worst_ratio": max(ratios.values()), "ratios": ratios, "mb_per_s": speeds}))


def measure(
    ours: Callable[[str], list[int]], bare: Callable[[str], list[int]], text: str, repeats: int
) -> tuple[float, float]:
    """Best seconds for one text of each."""
    rounds = max(1, 100_000 // len(text))
    best = [float("inf"), float("inf")]
    for _ in range(repeats):
        for side, encode in enumerate((ours, bare)):
            started = time.perf_counter()
            for _ in range(rounds):
                encode(text)
            best[side] = min(best[side], (time.perf_counter() - started) / rounds)
    return best[0], best[1]


if __name__ == "__main__":
    main()
