"""One real mesh of separate processes for all end-to-end tests: `meshfire up` with SmolLM2 and a made Kimi model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.mesh_process import MeshProcess, cached_model, start_mesh


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """2 prefill workers, 1 decode worker, 2 expert shards with FFN slices of SmolLM2; test hooks on."""
    smollm2 = cached_model("smollm2-135m-instruct")
    topology = {
        "mesh": "e2e",
        "http_port": 0,
        "test_hooks": True,
        "models": [
            {"model": str(smollm2), "prefill": 2, "decode": 1, "expert_shards": 2, "dense_slices": 2},
        ],
    }
    with start_mesh(topology, tmp_path_factory.mktemp("mesh")) as running:
        yield running
