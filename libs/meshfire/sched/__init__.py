"""Continuous batching as pure decisions: which sequences run, with which KV blocks, in which batch. Knows no wire."""
