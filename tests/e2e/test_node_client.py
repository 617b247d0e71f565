"""examples/node against a running mesh: a client in another language, from the contracts alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "node"
INSTALL_TIMEOUT_S = 300
CALL_TIMEOUT_S = 120

pytestmark = pytest.mark.timeout(INSTALL_TIMEOUT_S + CALL_TIMEOUT_S)


class Mesh(Protocol):
    """What these tests need of the fixture `mesh`."""

    @property
    def grpc_address(self) -> str: ...

    @property
    def model(self) -> str: ...


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example with its packages installed."""
    missing = [tool for tool in ("node", "npm") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not found: the Node client needs Node 18 or newer")
    folder = tmp_path_factory.mktemp("node") / "client"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("node_modules"))
    run(["npm", "ci", "--no-audit", "--no-fund"], folder, timeout_s=INSTALL_TIMEOUT_S, check=True)
    return folder


def run(
    command: list[str], folder: Path, *, timeout_s: float = CALL_TIMEOUT_S, check: bool = False
) -> subprocess.CompletedProcess[str]:
    env: Mapping[str, str] = os.environ | {"MESHFIRE_PROTOS": str(ROOT / "protos")}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def ask(client: Path, mesh: Mesh, *arguments: str, model: str | None = None) -> subprocess.CompletedProcess[str]:
    return run(["node", "chat.mjs", "--address", mesh.grpc_address, "--model", model or mesh.model, *arguments], client)


def test_the_answer_is_streamed_to_stdout_and_its_usage_to_stderr(client: Path, mesh: Mesh) -> None:
    done = ask(client, mesh, "--max-tokens", "8", "--temperature", "0", "What is the capital of France?")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "output tokens" in done.stderr
    assert (
        done.stdout
        == ask(client, mesh, "--max-tokens", "8", "--temperature", "0", "What is the capital of France?").stdout
    )


def test_an_error_ends_with_its_reason_and_exit_code_one(client: Path, mesh: Mesh) -> None:
    done = ask(client, mesh, "Hi", model="no-such-model")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("UNKNOWN_MODEL: ")
    done = ask(client, mesh, "--temperature", "9", "Hi")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("BAD_INPUT: ")


def test_wrong_usage_is_told_apart_from_a_failed_call(client: Path, mesh: Mesh) -> None:
    assert run(["node", "chat.mjs"], client).returncode == 2


def test_the_lock_file_names_no_registry() -> None:
    assert '"resolved"' not in (EXAMPLE / "package-lock.json").read_text()
