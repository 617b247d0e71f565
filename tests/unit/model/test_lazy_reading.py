"""What reading a part of a checkpoint costs: the bytes asked for, and the pages of the file that become resident."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from meshfire.model import registry
from meshfire.model.checkpoint import Checkpoint
from meshfire.model.matrices import read_matrix
from meshfire.modelstore.make import make_model

SHAPE = (1024, 512)  # 2 MiB in float32
NUM_MATRICES = 24
SMAPS = Path("/proc/self/smaps")


def resident_bytes(path: Path) -> int:
    """Pages of the file that this process has touched through a mapping."""
    total, mine = 0, False
    for line in SMAPS.read_text().splitlines():
        if line[0] in "0123456789abcdef":
            mine = line.endswith(str(path))
        elif mine and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(not SMAPS.exists(), reason="needs Linux's /proc")
def test_only_the_pages_of_what_is_used_become_resident(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({f"m{index}.weight": torch.ones(SHAPE) for index in range(NUM_MATRICES)}, path)
    checkpoint = Checkpoint(tmp_path)
    mapped = [read_matrix(checkpoint, f"m{index}", SHAPE) for index in range(NUM_MATRICES)]
    slack = NUM_MATRICES * 2**18  # Linux maps the pages around each one that is touched: here 64 KiB a tensor
    assert resident_bytes(path) < slack
    assert mapped[7].dequantized().sum() == 1024 * 512
    assert read_matrix(checkpoint, "m9", SHAPE, rows=slice(0, 64)).dequantized().sum() == 64 * 512
    assert 2 * 2**20 <= resident_bytes(path) < 2 * 2**20 + 64 * 512 * 4 + slack


@pytest.mark.parametrize(("name", "expert_bytes"), [("kimi-tiny-int4", 13_848), ("kimi-tiny-fp8", 46_104)])
def test_a_shard_asks_for_its_experts_bytes_and_no_more(
    name: str, expert_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(name, tmp_path / "made")
    asked: dict[str, int] = {}
    read = Checkpoint.read

    def counting(self: Checkpoint, tensor: str, *args: object, **options: object) -> torch.Tensor:
        part = read(self, tensor, *args, **options)
        asked[tensor] = asked.get(tensor, 0) + part.nbytes
        return part

    monkeypatch.setattr(Checkpoint, "read", counting)
    registry.open_experts(tmp_path / "made").load(2, 7)
    assert all(".layers.2.mlp.experts.7." in tensor for tensor in asked)
    assert sum(asked.values()) == expert_bytes
