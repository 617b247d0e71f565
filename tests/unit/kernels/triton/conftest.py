"""Triton kernels on the CPU: its interpreter must be chosen before the first kernel is defined."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="triton is not installed")
