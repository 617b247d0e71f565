"""Numerics: configuration, attention, gate, experts, sampling, checkpoints. Knows neither requests nor gRPC."""
