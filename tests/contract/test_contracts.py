"""The protobuf contracts: style, compatibility, and that the committed stubs are theirs."""

from __future__ import annotations

import filecmp
import subprocess
import sys
from pathlib import Path

import pytest

from meshfire.api.common.v1 import tensor_pb2
from meshfire.api.expert_shard.v1 import expert_shard_service_pb2
from meshfire.api.router.v1 import work_service_pb2

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(one) for one in command], cwd=cwd, capture_output=True, text=True, check=False)


def test_contracts_pass_bufs_standard_lint() -> None:
    done = run(BIN / "buf", "lint")
    assert done.returncode == 0, done.stdout + done.stderr


def test_contracts_break_nothing_of_the_last_commit_on_main() -> None:
    """With changed contracts the last commit is HEAD; in a clean tree it is the one before."""
    changed = run("git", "status", "--porcelain", "--", "protos").stdout.strip()
    ref = "HEAD" if changed else "HEAD~1"
    if run("git", "rev-parse", "--verify", f"{ref}:protos").returncode != 0:
        pytest.skip(f"{ref} has no contracts to compare with")
    done = run(BIN / "buf", "breaking", "--against", f".git#ref={run('git', 'rev-parse', ref).stdout.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_committed_stubs_are_what_the_protos_generate(tmp_path: Path) -> None:
    protos = sorted((ROOT / "protos").rglob("*.proto"))
    services = [one for one in protos if one.stem.endswith("_service")]
    for plugin, outputs, files in (
        ("mypy", ("--python_out", "--mypy_out=quiet"), protos),
        ("mypy_grpc", ("--grpc_python_out", "--mypy_grpc_out=quiet"), services),
    ):
        arguments = [f"{one}{':' if '=' in one else '='}{tmp_path}" for one in outputs]
        plugin_path = f"--plugin=protoc-gen-{plugin}={BIN / f'protoc-gen-{plugin}'}"
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", plugin_path, *arguments]
        done = run(*command, *files)
        assert done.returncode == 0, done.stderr
    committed = ROOT / "libs" / "meshfire" / "api"
    made = sorted(one.relative_to(tmp_path / "meshfire/api") for one in (tmp_path / "meshfire/api").rglob("*.py*"))
    kept = sorted(
        one.relative_to(committed)
        for one in committed.rglob("*.py*")
        if one.name != "__init__.py" and "__pycache__" not in one.parts
    )
    assert made == kept
    _, mismatch, errors = filecmp.cmpfiles(tmp_path / "meshfire/api", committed, map(str, made), shallow=False)
    assert (mismatch, errors) == ([], []), "run `make proto`"


def test_golden_bytes_of_a_hop_never_change() -> None:
    """Written by hand from the wire format: field 1 varint, field 4 a tensor."""
    request = expert_shard_service_pb2.ForwardRequest(
        hop_id=5,
        layer=2,
        hidden=tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[1, 1], data=b"\0\0\x80\x3f"),
    )
    golden = bytes.fromhex("08051002220c0801120201011a040000803f")
    assert request.SerializeToString(deterministic=True) == golden
    assert expert_shard_service_pb2.ForwardRequest.FromString(golden) == request


def test_enum_zero_never_means_anything() -> None:
    for module in (tensor_pb2, work_service_pb2):
        for enum in module.DESCRIPTOR.enum_types_by_name.values():
            assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")
