"""The router's metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from meshfire.telemetry import names
from services.router.lifecycle_events import Stage

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
#: added to both waits of a ratio: below it nobody cares
_RATIO_GRACE_S = 0.05
_SECONDS_PER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class Instruments:
    """`queue_depths` is read whenever metrics are collected."""

    def __init__(self, meter: Meter, queue_depths: Callable[[], Mapping[tuple[str, Stage], int]]) -> None:
        self.time_to_first_token = meter.create_histogram(
            names.METRIC_TTFT, "s", "From the call to its first token", explicit_bucket_boundaries_advisory=_SECONDS
        )
        self.time_per_output_token = meter.create_histogram(
            names.METRIC_TPOT,
            "s",
            "Mean time between tokens of one output",
            explicit_bucket_boundaries_advisory=_SECONDS_PER_TOKEN,
        )
        self.duration = meter.create_histogram(
            names.METRIC_REQUEST_DURATION,
            "s",
            "From the call to its end, by outcome",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self.queue_wait = meter.create_histogram(
            names.METRIC_ROUTER_QUEUE_WAIT,
            "s",
            "From queued to leased, by stage",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._predicted_wait = meter.create_histogram(
            names.METRIC_ROUTER_PREDICTED_WAIT,
            "s",
            "Wait that was predicted at admission",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._wait_ratio = meter.create_histogram(
            names.METRIC_ROUTER_WAIT_RATIO,
            "1",
            "Actual wait to predicted wait, both plus 50 ms",
            explicit_bucket_boundaries_advisory=_RATIOS,
        )
        self.active = meter.create_up_down_counter(names.METRIC_ROUTER_ACTIVE, "1", "Requests under way")
        self.refused = meter.create_counter(names.METRIC_ROUTER_REFUSED, "1", "Requests refused, by reason")
        self.failovers = meter.create_counter(names.METRIC_ROUTER_FAILOVERS, "1", "Leases made anew after a failure")
        self.tokens_prompt = meter.create_counter(names.METRIC_ROUTER_TOKENS_PROMPT, "1", "Prompt tokens admitted")
        self.tokens_output = meter.create_counter(names.METRIC_ROUTER_TOKENS_OUTPUT, "1", "Tokens delivered")

        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for (model, stage), depth in queue_depths().items():
                yield Observation(depth, {names.ATTR_MODEL: model, names.ATTR_WORKER_ROLE: stage.value})

        meter.create_observable_gauge(names.METRIC_ROUTER_QUEUED, [observe], "1", "Leases that wait, by stage")

    def wait_predicted(self, predicted_s: float, actual_s: float, labels: Mapping[str, str]) -> None:
        """A request's first wait is over: hold it against what was said at its admission."""
        self._predicted_wait.record(predicted_s, labels)
        self._wait_ratio.record((actual_s + _RATIO_GRACE_S) / (predicted_s + _RATIO_GRACE_S), labels)
