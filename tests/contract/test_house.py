"""The house rules that a machine can hold: style, types, one-way imports, small files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MAX_LINES = 400


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["lint-imports"], ["mypy"]],
    ids=["ruff", "format", "imports", "types"],
)
def test_the_checkers_are_content(command: list[str]) -> None:
    done = subprocess.run([str(BIN / command[0]), *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def sources() -> list[Path]:
    roots = [ROOT / "libs" / "meshfire", ROOT / "services"]
    return [one for root in roots for one in root.rglob("*.py") if "api" not in one.relative_to(root).parts[:1]]


def test_files_stay_small() -> None:
    long = {str(one.relative_to(ROOT)): n for one in sources() if (n := len(one.read_text().splitlines())) > MAX_LINES}
    assert not long, "what second idea moved in?"


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(one.relative_to(ROOT)) for one in sources() if not one.read_text().lstrip().startswith(('"""', 'r"""'))
    ]
    assert not silent


@pytest.mark.parametrize("service", ["gateway", "router", "tokenizer", "prefill", "decode", "expert_shard"])
def test_every_service_has_its_page_its_settings_and_its_entry(service: str) -> None:
    folder = ROOT / "services" / service
    for name in ("README.md", "__init__.py", "__main__.py", "config.py", "server.py"):
        assert (folder / name).is_file(), name
