"""Damaged safetensors files: whatever the bytes, a CheckpointError or the right tensor, never another exception."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from meshfire.errors import CheckpointError
from meshfire.model.checkpoint import Checkpoint

NAME = "model.norm.weight"
ANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def with_header(directory: Path, header: bytes, data: bytes = bytes(64)) -> Path:
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    return directory


def try_to_read(directory: Path) -> None:
    with suppress(CheckpointError):
        checkpoint = Checkpoint(directory)
        for name in checkpoint:
            with suppress(CheckpointError):
                checkpoint.read(name, (4, 4))


@given(data=st.data())
@ANY
def test_changed_and_cut_bytes_raise_nothing_else(data: st.DataObject, tmp_path: Path) -> None:
    save_file({NAME: torch.ones(4, 4), "other": torch.zeros(2)}, tmp_path / "model.safetensors")
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "model.safetensors").write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try_to_read(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "BF16", "F4", 7]) | JSON, "shape": st.just([4, 4]) | JSON},
    optional={"data_offsets": st.just([0, 64]) | JSON},
)


@given(header=JSON | st.dictionaries(st.text(max_size=4), ENTRY | JSON, max_size=3))
@ANY
def test_headers_of_any_json_raise_nothing_else(header: object, tmp_path: Path) -> None:
    try_to_read(with_header(tmp_path, json.dumps(header).encode()))


@pytest.mark.parametrize("header", [b"[]", b"7", b"[" * 100_000, b'{"a": {"dtype": "F32", "shape": [Infinity]}}'])
def test_headers_that_are_no_tables_are_refused(header: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        Checkpoint(with_header(tmp_path, header))


def test_a_wrong_tensor_is_named_with_its_file(tmp_path: Path) -> None:
    save_file({NAME: torch.ones(4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{NAME} of .*model\.safetensors has shape"):
        Checkpoint(tmp_path).read(NAME, (4, 5))
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"model\.safetensors is truncated: tensor {NAME}"):
        Checkpoint(tmp_path)
