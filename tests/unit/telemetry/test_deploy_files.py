"""The monitoring files for users: well-formed, and asking only for metrics that the code has."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from meshfire.telemetry import names

DEPLOY = Path(__file__).parents[3] / "deploy"
SUFFIXES = re.compile(r"(_seconds)?(_bucket|_sum|_count)?$|_total$")


@pytest.mark.parametrize("path", sorted([*DEPLOY.glob("otel/*.yaml"), *DEPLOY.glob("prometheus/*.yml")]), ids=str)
def test_the_file_is_yaml(path: Path) -> None:
    assert yaml.safe_load(path.read_text(encoding="utf-8"))


def test_alerts_ask_only_for_declared_metrics() -> None:
    declared = {name.replace(".", "_") for name in names.names_of("METRIC_").values()}
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    labels = {name.replace(".", "_") for name in names.names_of("ATTR_").values()}
    for rule in rules:
        asked = set(re.findall(r"\b(?:meshfire|gen_ai|http)_\w+", rule["expr"]))
        unknown = {name for name in asked - labels if not {name, SUFFIXES.sub("", name)} & declared}
        assert not unknown, rule["alert"]


def test_the_collector_pipeline_names_only_parts_that_are_configured() -> None:
    config = yaml.safe_load((DEPLOY / "otel" / "collector.yaml").read_text(encoding="utf-8"))
    for pipeline in config["service"]["pipelines"].values():
        for kind, used in pipeline.items():
            assert set(used) <= set(config[kind])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("arguments", [("config", "prometheus.yml"), ("rules", "alerts.yml")])
def test_promtool_accepts_the_file(arguments: tuple[str, str]) -> None:
    what, name = arguments
    checked = subprocess.run(
        ["promtool", "check", what, DEPLOY / "prometheus" / name], capture_output=True, text=True, timeout=30
    )
    assert checked.returncode == 0, checked.stderr
