"""Tensor parallelism inside a worker: rank processes that share one model's heads, neurons and KV memory."""
