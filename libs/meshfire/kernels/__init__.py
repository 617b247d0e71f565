"""Kernels by kind of device: compiled loops that the compute paths call."""
