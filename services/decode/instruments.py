"""The metrics of a decode worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from meshfire.telemetry import names
from services.decode.planning import PartResult


class DecodeInstruments:
    """Counters and histograms; gauges are read through the callables given to `observe`."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._tokens = meter.create_counter(names.METRIC_DECODE_TOKENS, "{token}", "Tokens generated")
        self._steps = meter.create_histogram(names.METRIC_DECODE_STEP_DURATION, "s", "Time of one step")
        self._batch = meter.create_histogram(names.METRIC_DECODE_BATCH, "{sequence}", "Sequences of one step")
        self._preemptions = meter.create_counter(
            names.METRIC_DECODE_PREEMPTIONS, "{sequence}", "Sequences that lost their KV blocks to older ones"
        )
        self._prompt_tokens = meter.create_counter(
            names.METRIC_DECODE_PROMPT_TOKENS, "{token}", "Tokens computed of prompts and of what was preempted"
        )
        self._drafted = meter.create_counter(names.METRIC_DECODE_DRAFTED, "{token}", "Tokens guessed ahead")
        self._accepted = meter.create_counter(names.METRIC_DECODE_ACCEPTED, "{token}", "Guesses that were right")
        self._kv_bytes = meter.create_counter(names.METRIC_KV_BYTES_READ, "By", "KV read from prefill workers")

    def observe(
        self,
        *,
        num_blocks: int,
        num_free: Callable[[], int],
        num_running: Callable[[], int],
        num_waiting: Callable[[], int],
    ) -> None:
        """Register the gauges."""
        gauge = self._meter.create_observable_gauge
        gauge(names.METRIC_KV_BLOCKS_TOTAL, [_reading(lambda: num_blocks)], "{block}", "KV blocks of this worker")
        gauge(names.METRIC_KV_BLOCKS_FREE, [_reading(num_free)], "{block}", "KV blocks free or evictable")
        gauge(names.METRIC_DECODE_RUNNING, [_reading(num_running)], "{sequence}", "Sequences that read KV or run")
        gauge(names.METRIC_DECODE_WAITING, [_reading(num_waiting)], "{sequence}", "Sequences without KV blocks")

    def step_done(self, results: Sequence[PartResult], seconds: float) -> None:
        """One step, waiting for its turn on the model thread included."""
        self._steps.record(seconds)
        self._batch.record(len(results))
        self._tokens.add(sum(len(one.sampled) for one in results))
        num_more = sum(one.part.stop - one.part.start for one in results if one.part.stop - one.part.start > 1)
        if num_more:
            self._prompt_tokens.add(num_more)
        num_drafted = sum(len(one.part.draft_ids) for one in results)
        if num_drafted:
            self._drafted.add(num_drafted)
            self._accepted.add(sum(one.num_accepted for one in results))

    def preempted(self) -> None:
        """One sequence lost its blocks."""
        self._preemptions.add(1)

    def kv_read(self, num_bytes: int) -> None:
        """One read that was completed."""
        self._kv_bytes.add(num_bytes)


def _reading(read: Callable[[], int]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    return lambda _options: [Observation(read())]
