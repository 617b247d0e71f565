"""Traces and metrics: names, the SDK's wiring, spans over messages, a local trace store and its waterfall.

The lowest layer beside the errors: imports neither `rpc` nor `runtime`; gRPC only in `sink`, which receives OTLP.
"""
