"""The metrics of a prefill worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from meshfire.telemetry import names


class PrefillInstruments:
    """Counters and histograms; gauges are read through the callables given to `observe`."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._tokens = meter.create_counter(names.METRIC_PREFILL_TOKENS, "{token}", "Prompt tokens computed")
        self._cached = meter.create_counter(
            names.METRIC_PREFILL_TOKENS_CACHED, "{token}", "Prompt tokens found in the prefix cache"
        )
        self._chunks = meter.create_histogram(
            names.METRIC_PREFILL_CHUNK_DURATION, "s", "Time of one chunk on the model thread"
        )
        self._sent = meter.create_counter(names.METRIC_KV_BYTES_SENT, "By", "KV sent to decode workers")

    def observe(self, *, num_blocks: int, num_free: Callable[[], int], num_leases: Callable[[], int]) -> None:
        """Register the gauges."""
        gauge = self._meter.create_observable_gauge
        gauge(names.METRIC_KV_BLOCKS_TOTAL, [_reading(lambda: num_blocks)], "{block}", "KV blocks of this worker")
        gauge(names.METRIC_KV_BLOCKS_FREE, [_reading(num_free)], "{block}", "KV blocks free or evictable")
        gauge(names.METRIC_KV_LEASES, [_reading(num_leases)], "{lease}", "KV offered and not yet released")

    def chunk_done(self, num_tokens: int, seconds: float) -> None:
        """One step of the model."""
        self._tokens.add(num_tokens)
        self._chunks.record(seconds)

    def prefix_reused(self, num_tokens: int) -> None:
        """Tokens that needed no step."""
        self._cached.add(num_tokens)

    def kv_sent(self, num_bytes: int) -> None:
        """One read that was sent whole."""
        self._sent.add(num_bytes)


def _reading(read: Callable[[], int]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    return lambda _options: [Observation(read())]
