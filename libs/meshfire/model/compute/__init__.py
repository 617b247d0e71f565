"""Compute paths: how the matrix products of a decoder are done on one kind of device at one precision."""
