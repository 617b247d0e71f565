"""Topology files and the plan made from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshfire.cluster import ports
from meshfire.cluster.plan import STOP_ORDER, ProcessSpec, ResolvedModel, Wiring, plan, shard_ids
from meshfire.cluster.topology import Topology, load, parse
from meshfire.errors import BadInput

TWO_MODELS = {
    "http_port": 8000,
    "models": [
        {"model": "a", "prefill": 2, "decode": 1, "expert_shards": 2},
        {"model": "/models/b", "name": "bee", "prefill": 1, "decode": 2, "expert_shards": 1},
    ],
}


def planned(topology: Topology) -> list[ProcessSpec]:
    models = [ResolvedModel(one, Path("/d") / one.served_name, one.expert_shards or 0, 0) for one in topology.models]
    return plan(topology, models, Wiring("static:/r.json", "http://c:4317"), ports.counted_from(9000))


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ({"models": []}, "models"),
        ({}, "models"),
        ({"models": [{"model": "a"}], "http_port": 70000}, "http_port"),
        ({"models": [{"model": "a", "prefil": 2}]}, "models.0.prefil"),
        ({"models": [{"model": "a", "decode": 0}]}, "models.0.decode"),
        ({"models": [{"model": "a"}, {"model": "x/a"}]}, "topology"),
        ({"models": [{"model": "a"}], "mesh": "../up"}, "mesh"),
        (["models"], "topology"),
    ],
)
def test_a_wrong_topology_names_the_field(raw: object, field: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse(raw)
    assert caught.value.field == field


def test_a_missing_or_broken_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no topology file"):
        load(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("models: [")
    with pytest.raises(BadInput, match="not YAML"):
        load(broken)


def test_the_plan_has_each_process_once_with_its_own_address() -> None:
    specs = planned(parse(TWO_MODELS))
    names = [one.name for one in specs]
    assert names == [
        "tokenizer-0", "router-0", "expert-0", "expert-1", "prefill-0", "prefill-1", "decode-0",
        "expert-2", "prefill-2", "decode-1", "decode-2", "gateway-0",
    ]  # fmt: skip
    addresses = [one.address for one in specs] + [one.http_address for one in specs if one.http_address]
    assert len(set(addresses)) == len(addresses)
    assert {one.service for one in specs} == set(STOP_ORDER)


def test_workers_get_their_own_model_and_only_their_own_shards() -> None:
    topology = parse(TWO_MODELS)
    by_name = {one.name: one for one in planned(topology)}
    assert by_name["prefill-2"].env["MESHFIRE_PREFILL_MODEL_DIR"] == "/d/bee"
    assert by_name["prefill-2"].env["MESHFIRE_PREFILL_EXPERTS"] == "mesh"
    assert by_name["prefill-2"].depends_on == ["expert-2"]
    assert by_name["expert-2"].env["MESHFIRE_EXPERT_SHARD_SHARD_ID"] == "expert-2"
    assert json.loads(by_name["tokenizer-0"].env["MESHFIRE_TOKENIZER_MODELS"]) == {"a": "/d/a", "bee": "/d/bee"}
    models = [ResolvedModel(one, Path("/d"), one.expert_shards or 0, 0) for one in topology.models]
    assert shard_ids(topology, models, 1) == ["expert-2"]


def test_the_shipped_topologies_are_valid() -> None:
    root = Path(__file__).resolve().parents[3]
    assert load(root / "deploy/topology.yaml").base_port
    assert load(root / "examples/demo-topology.yaml").models[0].prefill == 2


def test_free_ports_never_repeat() -> None:
    next_port = ports.free_ports()
    given = [next_port() for _ in range(20)]
    assert len(set(given)) == 20
