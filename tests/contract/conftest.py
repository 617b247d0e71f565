"""Shared by the contract tests: a real Consul agent's binary, found, or fetched into a cache outside the repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from meshfire.discovery.agent import default_binary, find_agent

FETCH = Path(__file__).parents[2] / "deploy" / "consul" / "fetch-consul.sh"


@pytest.fixture(scope="session")
def consul_binary() -> Path:
    """Skips, saying why, where no agent can be had."""
    found = find_agent()
    if found is not None:
        return found
    target = default_binary()
    fetched = subprocess.run([FETCH, target], capture_output=True, text=True, timeout=300)
    if fetched.returncode != 0:
        pytest.skip(f"no Consul agent here: {fetched.stderr.strip()}")
    return target
