"""The routing receipt as a header: who did the work and why, for whoever wonders."""

from __future__ import annotations

from collections.abc import Sequence

from meshfire.api.router.v1 import inference_service_pb2 as pb

RECEIPT_HEADER = "x-meshfire-receipt"
#: receipts of one header: an answer of 128 choices must not outgrow a client's header limit
_MAX_RECEIPTS = 16


def header(receipts: Sequence[pb.RoutingReceipt]) -> dict[str, str]:
    """One entry per output, the first ones, in the form of a structured field list: `prefill;decode=…;…, …`."""
    told = ", ".join(_entry(one) for one in receipts[:_MAX_RECEIPTS])
    return {RECEIPT_HEADER: told} if told else {}


def _entry(one: pb.RoutingReceipt) -> str:
    values = {
        "decode": f'"{one.decode_worker_id}"',
        "why": one.placement or "unknown",
        "cached-expected": one.num_cached_expected,
        "queue-ms": one.queue_ms,
        "predicted-queue-ms": one.predicted_queue_ms,
        "failovers": one.num_failovers,
        "kv-bytes": one.kv_bytes,
    }
    return f'"{one.prefill_worker_id}"' + "".join(f";{name}={value}" for name, value in values.items())
