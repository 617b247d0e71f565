"""Triton kernels of the CUDA path. Import one of its modules only where triton is installed."""
