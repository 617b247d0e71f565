"""The Tiltfile, evaluated by a Starlark interpreter against stubs of Tilt's functions with Tilt's own signatures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import starlark as sl

from meshfire.cluster import ports
from meshfire.cluster.plan import ProcessSpec, ResolvedModel, Wiring, plan
from meshfire.cluster.topology import load

ROOT = Path(__file__).resolve().parents[3]
PRELUDE = """
config = struct(define_string=config_define_string, parse=config_parse)
"""


class Tilt:
    """Records what a Tiltfile asks for. A misspelt keyword is a TypeError, as in Tilt an error."""

    def __init__(self, processes: list[dict[str, Any]]) -> None:
        self.processes = processes
        self.resources: dict[str, dict[str, Any]] = {}
        self.shell: list[str] = []
        self.watched: list[str] = []

    def local_resource(
        self,
        name: str,
        cmd: Any = None,
        deps: Any = None,
        trigger_mode: Any = None,
        resource_deps: Any = None,
        ignore: Any = None,
        auto_init: bool = True,
        serve_cmd: Any = None,
        cmd_bat: Any = None,
        serve_cmd_bat: Any = None,
        allow_parallel: bool = False,
        links: Any = None,
        labels: Any = None,
        env: Any = None,
        serve_env: Any = None,
        readiness_probe: Any = None,
        dir: str | None = None,  # noqa: A002
        serve_dir: str | None = None,
    ) -> None:
        assert name not in self.resources, f"duplicate resource {name}"
        assert cmd or serve_cmd, f"{name} does nothing"
        assert serve_cmd or not readiness_probe, f"{name}: a probe without serve_cmd is ignored"
        self.resources[name] = {
            "cmd": cmd,
            "serve_cmd": serve_cmd,
            "serve_env": serve_env or {},
            "resource_deps": resource_deps or [],
            "probe": readiness_probe,
            "labels": labels or [],
            "links": links or [],
            "deps": deps or [],
        }

    def probe(
        self,
        initial_delay_secs: int = 0,
        timeout_secs: int = 1,
        period_secs: int = 10,
        success_threshold: int = 1,
        failure_threshold: int = 3,
        exec: Any = None,  # noqa: A002
        http_get: Any = None,
        tcp_socket: Any = None,
    ) -> dict[str, Any]:
        actions = [one for one in (exec, http_get, tcp_socket) if one is not None]
        assert len(actions) == 1, "exactly one action"
        return {"period_secs": period_secs, "action": actions[0]}

    def exec_action(self, command: list[str]) -> dict[str, Any]:
        return {"exec": command}

    def http_get_action(self, port: int, host: str = "localhost", scheme: str = "http", path: str = "") -> Any:
        return {"http": f"{scheme}://{host}:{port}{path}"}

    def link(self, url: str, name: str = "") -> dict[str, str]:
        return {"url": url, "name": name}

    def local(self, command: Any, quiet: bool = False) -> str:
        self.shell.append(command)
        return json.dumps(self.processes)

    def evaluate(self) -> None:
        dialect = sl.Dialect.extended()
        dialect.enable_top_level_stmt = True
        dialect.enable_f_strings = False
        module = sl.Module()
        functions = {
            "analytics_settings": lambda enable: None,
            "version_settings": lambda constraint=None, check_updates=True: None,
            "config_define_string": lambda name, args=False, usage="": None,
            "config_parse": dict,
            "watch_file": self.watched.append,
            "decode_json": json.loads,
            "warn": lambda text: None,
            **{
                name: getattr(self, name)
                for name in ("local_resource", "probe", "exec_action", "http_get_action", "link", "local")
            },
        }
        for name, function in functions.items():
            module.add_callable(name, function)
        text = PRELUDE + (ROOT / "Tiltfile").read_text()
        built_ins = sl.Globals.extended_by([sl.LibraryExtension.StructType])
        sl.eval(module, sl.parse("Tiltfile", text, dialect), built_ins)


@pytest.fixture
def specs() -> list[ProcessSpec]:
    topology = load(ROOT / "deploy" / "topology.yaml")
    models = [ResolvedModel(one, Path("/models/m"), one.expert_shards or 0, 2) for one in topology.models]
    wiring = Wiring(topology.registry, topology.otlp_endpoint)
    return plan(topology, models, wiring, ports.counted_from(topology.base_port))


@pytest.fixture
def tilt(specs: list[ProcessSpec]) -> Tilt:
    processes = [{**vars(one), "env": dict(one.env), "command": one.command} for one in specs]
    tilt = Tilt(processes)
    tilt.evaluate()
    return tilt


def test_tilt_starts_every_process_of_the_topology_with_its_environment(tilt: Tilt, specs: list[ProcessSpec]) -> None:
    for spec in specs:
        resource = tilt.resources[spec.name]
        assert resource["serve_cmd"] == spec.command
        assert resource["serve_env"] == dict(spec.env)
        assert resource["labels"]
    assert any("plan --topology deploy/topology.yaml" in command for command in tilt.shell)
    assert tilt.watched == ["deploy/topology.yaml"]


def test_every_server_has_a_readiness_probe_of_a_second_or_two(tilt: Tilt, specs: list[ProcessSpec]) -> None:
    for name, resource in tilt.resources.items():
        if resource["serve_cmd"]:
            assert resource["probe"], name
            assert resource["probe"]["period_secs"] <= 2, name
    for spec in specs:
        assert tilt.resources[spec.name]["probe"]["action"]["exec"][-2:] == ["health", spec.address]


def test_dependencies_exist_and_have_no_cycle(tilt: Tilt) -> None:
    done: set[str] = set()
    waiting = {name: set(one["resource_deps"]) for name, one in tilt.resources.items()}
    while waiting:
        ready = {name for name, needs in waiting.items() if needs <= done}
        assert ready, f"cycle or unknown name in {waiting}"
        done |= ready
        waiting = {name: needs for name, needs in waiting.items() if name not in ready}


def test_consul_and_a_trace_viewer_are_part_of_it(tilt: Tilt) -> None:
    assert {"consul", "trace-viewer", "placement"} <= set(tilt.resources)


def test_watched_folders_exist(tilt: Tilt) -> None:
    for resource in tilt.resources.values():
        for path in resource["deps"]:
            assert (ROOT / path).exists(), path
