"""The metrics of an expert shard. Owns plain totals that the meter reads when it is asked: a hop costs additions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from meshfire.telemetry import names
from services.expert_shard.forwarder import HopCost


class ShardInstruments:
    """Totals since start. Any thread."""

    def __init__(self, meter: Meter, shard_id: str) -> None:
        self.hops = self.tokens = self.bytes_in = self.bytes_out = self.queue_ns = self.compute_ns = 0
        self._adding = threading.Lock()
        self._attributes = {names.ATTR_SHARD_ID: shard_id}
        counter = meter.create_observable_counter
        counter(names.METRIC_EXPERT_HOPS, [self._reading(lambda: self.hops)], "{hop}", "Hops answered")
        counter(names.METRIC_EXPERT_TOKENS, [self._reading(lambda: self.tokens)], "{token}", "Rows computed")
        counter(names.METRIC_EXPERT_BYTES_RECEIVED, [self._reading(lambda: self.bytes_in)], "By", "Hidden states in")
        counter(names.METRIC_EXPERT_BYTES_SENT, [self._reading(lambda: self.bytes_out)], "By", "Partial sums out")
        counter(names.METRIC_EXPERT_QUEUE, [self._reading(lambda: self.queue_ns / 1e9)], "s", "Time hops waited")
        counter(names.METRIC_EXPERT_COMPUTE, [self._reading(lambda: self.compute_ns / 1e9)], "s", "Time computing")

    def record(self, cost: HopCost) -> None:
        """One answered hop."""
        with self._adding:
            self.hops += 1
            self.tokens += cost.tokens
            self.bytes_in += cost.bytes_in
            self.bytes_out += cost.bytes_out
            self.queue_ns += cost.queue_ns
            self.compute_ns += cost.compute_ns

    def _reading(self, read: Callable[[], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda _options: [Observation(read(), self._attributes)]
