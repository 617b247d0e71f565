"""URLs of registries, and where an agent's binary is looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshfire.discovery import open_registry
from meshfire.discovery.agent import AgentPorts, ConsulAgent, default_binary, find_agent
from meshfire.discovery.consul import ConsulRegistry
from meshfire.discovery.memory import MemoryRegistry
from meshfire.discovery.static import StaticRegistry
from meshfire.errors import BadInput, Unavailable


async def test_each_scheme_opens_its_registry_without_connecting(tmp_path: Path) -> None:
    for url, kind in (
        ("memory:", MemoryRegistry),
        (f"static:{tmp_path}/t.json", StaticRegistry),
        (f"static://{tmp_path}/t.json", StaticRegistry),
        ("consul://127.0.0.1:1", ConsulRegistry),
        ("consul://[::1]", ConsulRegistry),
    ):
        registry = open_registry(url)
        assert type(registry) is kind
        await registry.close()


@pytest.mark.parametrize(
    "url",
    ["", "consul", "consul:", "consul://", "consul://h:port", "consul://h:99999", "static:", "memory:x", "etcd://h"],
)
def test_any_other_url_is_refused_with_the_field_named(url: str) -> None:
    with pytest.raises(BadInput) as refused:
        open_registry(url)
    assert refused.value.field == "registry_url"


def test_a_directory_is_no_topology_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        open_registry(f"static:{tmp_path}")


def test_the_named_binary_wins_over_path_and_path_over_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def binary(path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return path

    monkeypatch.setenv("MESHFIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("MESHFIRE_CONSUL_BIN", raising=False)
    assert find_agent() is None
    cached = binary(default_binary())
    assert cached == tmp_path / "cache" / "bin" / "consul"
    assert find_agent() == cached
    on_path = binary(tmp_path / "bin" / "consul")
    assert find_agent() == on_path
    named = binary(tmp_path / "named")
    monkeypatch.setenv("MESHFIRE_CONSUL_BIN", str(named))
    assert find_agent() == named
    named.unlink()
    assert find_agent() is None  # a wrong name is not silently replaced by another agent


def test_ports_differ_and_a_given_one_is_kept() -> None:
    ports = AgentPorts.free(http=18500)
    assert ports.http == 18500
    assert len({ports.http, ports.server, ports.serf_lan, ports.serf_wan}) == 4


@pytest.mark.parametrize("script", ["exit 0", "echo Consul v9.9.9; test $1 = version || exit 7"])
async def test_a_binary_that_is_no_agent_or_does_not_start_is_named_in_the_error(tmp_path: Path, script: str) -> None:
    fake = tmp_path / "consul"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    with pytest.raises(Unavailable, match=str(fake)):
        await ConsulAgent(fake).start()
    with pytest.raises(Unavailable, match="nowhere"):
        await ConsulAgent(tmp_path / "nowhere").start()
