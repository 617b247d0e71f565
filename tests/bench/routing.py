"""Prefix hits of real request traces: `python -m tests.bench.routing [--requests N] [--replicas 8]`.

Replays the Mooncake traces (blocks of 512 tokens, arrival times) against the router's own placement, with a block
account per replica instead of a model: a replica computes what its cache does not hold, one prompt after another, at a
pace that keeps all of them `--utilisation` busy without any hit, and evicts the least recently used block beyond
`--blocks`. Round robin runs beside it on the same requests. A router sees only what replicas tell it, `--lag-ms` late:
which blocks came and went when a prompt was placed, and what is still to compute when one begins or ends.

`hit_ratio_*` is our hit rate through round robin's, with 2,000 blocks a replica (endless caches are in `cases`);
`max_over_mean` the computed tokens of the busiest replica through the mean; `affinity_of_ceiling` the hit rate with
session keys, endless caches, through that of one endless cache; `routers_spread` the largest difference of hit rates of
1, 2 and 3 routers, in points. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import itertools
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.router.lifecycle_events import Stage
from services.router.placement import Crowd, Placement, choose
from services.router.tickets import Priority, Ticket
from services.router.workers import Geometry, Worker, WorkerFacts

BLOCK_TOKENS = 512
TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "mooncake-traces"
ENDLESS = 0


@dataclass(frozen=True)
class Request:
    """One line of a trace."""

    arrival_s: float
    num_tokens: int
    hashes: tuple[bytes, ...]
    session: str


def read_trace(file: Path, limit: int | None) -> list[Request]:
    """A trace with sessions: a request continues the session of the first request that had its last known block, if
    that block is not the opening of many (its first two blocks are a system prompt at most)."""
    requests: list[Request] = []
    session_of: dict[int, str] = {}
    with gzip.open(file, "rt") as lines:
        for number, line in enumerate(lines):
            if limit is not None and number >= limit:
                break
            raw = json.loads(line)
            ids = raw["hash_ids"]
            known = next((one for one in reversed(ids[2:]) if one in session_of), None)
            session = f"s{number}" if known is None else session_of[known]
            for one in ids[2:]:
                session_of.setdefault(one, session)
            hashes = tuple(one.to_bytes(16, "little") for one in ids)
            requests.append(Request(raw["timestamp"] / 1000, raw["input_length"], hashes, session))
    return requests


@dataclass(frozen=True)
class Taken:
    """What serving one request did: blocks found, tokens computed until when, blocks that came and went."""

    num_found: int
    num_computed: int
    done_s: float
    stored: list[bytes]
    evicted: list[bytes]


class Replica:
    """A worker's cache and backlog: what it holds, what it has still to compute, when it will be done."""

    def __init__(self, name: str, max_blocks: int, tokens_per_s: float) -> None:
        self.name = name
        self.computed_tokens = 0
        self._max_blocks = max_blocks
        self._tokens_per_s = tokens_per_s
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._busy_until_s = 0.0

    def take(self, request: Request) -> Taken:
        """Serve one request."""
        found = 0
        while found < len(request.hashes) and request.hashes[found] in self._blocks:
            found += 1
        to_compute = max(1, request.num_tokens - found * BLOCK_TOKENS)
        self.computed_tokens += to_compute
        self._busy_until_s = max(self._busy_until_s, request.arrival_s) + to_compute / self._tokens_per_s
        done_s = self._busy_until_s
        stored = [one for one in request.hashes if one not in self._blocks]
        for one in reversed(request.hashes):  # a prefix outlives what follows it
            self._blocks[one] = None
            self._blocks.move_to_end(one)
        evicted = []
        while self._max_blocks and len(self._blocks) > self._max_blocks:
            evicted.append(self._blocks.popitem(last=False)[0])
        return Taken(found, to_compute, done_s, stored, evicted)


class Router:
    """The product's placement over its own, late view of the replicas."""

    def __init__(self, replicas: Sequence[Replica], lag_s: float) -> None:
        self._lag_s = lag_s
        self._workers = {one.name: _worker(one.name, Stage.PREFILL) for one in replicas}
        self._reader = _worker("reader", Stage.DECODE)
        #: (when it is heard, number, of which replica, tokens more to compute, blocks that came, blocks that went)
        self._news: list[tuple[float, int, str, int, list[bytes], list[bytes]]] = []
        self._numbers = itertools.count()
        self._pending = dict.fromkeys(self._workers, 0)
        self._seen = dict.fromkeys(self._workers, 0)

    def told(self, now_s: float, name: str, taken: Taken, *, own: bool) -> None:
        """A replica took a request; `own` = this router's, whose lease it then has counted."""
        self._hear(now_s, name, taken.num_computed, taken.stored, taken.evicted)
        self._hear(taken.done_s, name, -taken.num_computed, [], [])
        self._seen[name] += own

    def _hear(self, at_s: float, name: str, tokens: int, stored: list[bytes], evicted: list[bytes]) -> None:
        heapq.heappush(self._news, (at_s + self._lag_s, next(self._numbers), name, tokens, stored, evicted))

    def place(self, request: Request, *, sessions: bool) -> str:
        while self._news and self._news[0][0] <= request.arrival_s:
            _, _, name, tokens, stored, evicted = heapq.heappop(self._news)
            worker = self._workers[name]
            worker.prefixes.apply(removed=evicted, stored=stored)
            self._pending[name] += tokens
            worker.credit(64, 1 << 40, self._seen[name], self._pending[name])
        ticket = Ticket(
            Priority.ONLINE,
            0,
            "q",
            "m",
            Stage.PREFILL,
            request.num_tokens,
            session_key=request.session if sessions else "",
            block_hashes=request.hashes,
        )
        choice = choose(ticket, Crowd(list(self._workers.values()), [self._reader]))
        assert isinstance(choice, Placement), "64 slots are never taken here"
        name = choice.worker.facts.worker_id
        choice.worker.lease_sent(0, request.num_tokens - choice.num_cached)
        return name


def _worker(name: str, stage: Stage) -> Worker:
    geometry = Geometry(1, BLOCK_TOKENS, 1, 1)
    worker = Worker(WorkerFacts(name, stage, "m", "r", geometry, "host:1", 1 << 20, 1, frozenset()))
    worker.credit(64, 1 << 40, 0)
    return worker


@dataclass(frozen=True)
class Outcome:
    """Of one replay."""

    hit_rate: float
    max_over_mean: float


@dataclass(frozen=True)
class Setting:
    """How a trace is replayed."""

    replicas: int
    max_blocks: int
    utilisation: float
    lag_s: float
    num_routers: int = 1
    sessions: bool = False
    round_robin: bool = False


def replay(requests: Sequence[Request], setting: Setting) -> Outcome:
    """Every request in order of arrival, to one of the routers in turn."""
    seconds = requests[-1].arrival_s - requests[0].arrival_s
    pace = sum(one.num_tokens for one in requests) / seconds / setting.replicas / setting.utilisation
    replicas = {f"p{number}": Replica(f"p{number}", setting.max_blocks, pace) for number in range(setting.replicas)}
    routers = [Router(list(replicas.values()), setting.lag_s) for _ in range(setting.num_routers)]
    turn = _endlessly(list(replicas))
    found = total = 0
    for number, request in enumerate(requests):
        router = routers[number % len(routers)]
        name = next(turn)
        if not setting.round_robin:
            name = router.place(request, sessions=setting.sessions)
        taken = replicas[name].take(request)
        for one in routers:
            one.told(request.arrival_s, name, taken, own=one is router)
        found += taken.num_found
        total += len(request.hashes)
    loads = [one.computed_tokens for one in replicas.values()]
    return Outcome(found / total, max(loads) * len(loads) / sum(loads))


def _endlessly(names: list[str]) -> Iterator[str]:
    while True:
        yield from names


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, help="of each trace; default: all")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=2000)
    parser.add_argument("--utilisation", type=float, default=0.7)
    parser.add_argument("--lag-ms", type=float, default=50.0)
    parser.add_argument("--traces", type=Path, default=TRACES)
    asked = parser.parse_args()
    if not asked.traces.is_dir():
        raise SystemExit(f"no traces at {asked.traces}")
    result: dict[str, object] = {}
    cases = []
    imbalance = 0.0
    spread: list[float] = []
    for name in ("conversation", "synthetic"):
        requests = read_trace(asked.traces / f"{name}_trace.jsonl.gz", asked.requests)
        for max_blocks in (ENDLESS, asked.blocks):

            def run(max_blocks: int = max_blocks, requests: list[Request] = requests, **more: object) -> Outcome:
                base = {"replicas": asked.replicas, "utilisation": asked.utilisation, "lag_s": asked.lag_ms / 1000}
                return replay(requests, Setting(max_blocks=max_blocks, **(base | more)))  # type: ignore[arg-type]

            turn = run(round_robin=True)
            ours = [run(num_routers=number) for number in (1, 2, 3)]
            ceiling = run(replicas=1, max_blocks=ENDLESS, round_robin=True)
            affine = run(sessions=True)
            case = {
                "trace": name,
                "blocks": max_blocks or "endless",
                "round_robin": turn.hit_rate,
                "ours_1_2_3_routers": [one.hit_rate for one in ours],
                "with_sessions": affine.hit_rate,
                "ceiling": ceiling.hit_rate,
                "max_over_mean": ours[0].max_over_mean,
                "max_over_mean_sessions": affine.max_over_mean,
            }
            cases.append(case)
            print(json.dumps(case), flush=True)
            spread.append(100 * (max(one.hit_rate for one in ours) - min(one.hit_rate for one in ours)))
            if name == "conversation":
                imbalance = max(imbalance, ours[0].max_over_mean)
                if max_blocks == ENDLESS:
                    result["affinity_of_ceiling"] = affine.hit_rate / ceiling.hit_rate
            if max_blocks:
                result[f"hit_ratio_{name}"] = ours[0].hit_rate / turn.hit_rate
            else:
                result[f"hit_ratio_{name}_endless"] = ours[0].hit_rate / turn.hit_rate
    result |= {"max_over_mean": imbalance, "routers_spread": max(spread), "cases": cases}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
