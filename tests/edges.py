"""The architecture as a table: which service's span is the parent of which other service's span in one request.

`docs/architecture.md` draws it; `tests/mesh/test_traces.py` checks it against the spans of real requests.
"""

from __future__ import annotations

from meshfire.telemetry import names

#: services of one chat over HTTP, in the order in which they first act
SERVICES = ("gateway", "router", "tokenizer", "prefill", "expert_shard", "decode")

#: (calling service, its span) → (called service, its span)
EDGES = {
    ("gateway", names.SPAN_GATEWAY_REQUEST): {("router", names.SPAN_ROUTER_GENERATE)},
    ("router", names.SPAN_ROUTER_GENERATE): {
        ("tokenizer", names.SPAN_TOKENIZER_DETOKENIZE),
        ("prefill", names.SPAN_PREFILL_LEASE),
        ("prefill", names.SPAN_PREFILL_READ_KV),
        ("decode", names.SPAN_DECODE_LEASE),
    },
    ("router", names.SPAN_ROUTER_TOKENIZE): {("tokenizer", names.SPAN_TOKENIZER_TOKENIZE)},
    ("prefill", names.SPAN_PREFILL_LEASE): {("expert_shard", names.SPAN_EXPERT_FORWARD)},
    ("decode", names.SPAN_DECODE_LEASE): {("expert_shard", names.SPAN_EXPERT_FORWARD)},
}
