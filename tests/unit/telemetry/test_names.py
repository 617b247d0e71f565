"""Names are spelt once, in names.py, and the table in docs/telemetry.md lists the same ones."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshfire.telemetry import names

ROOT = Path(__file__).parents[3]
NAMES = ROOT / "libs" / "meshfire" / "telemetry" / "names.py"
LIKE_A_NAME = re.compile(r"(meshfire|gen_ai)\.[a-z0-9_.]*")
SPAN_CALLS = {"start_span", "span", "start_as_current_span"}
INSTRUMENT_CALLS = re.compile(r"create_(observable_)?(counter|gauge|histogram|up_down_counter)")


def sources() -> list[Path]:
    trees = [ROOT / "libs", ROOT / "services"]
    found = [path for tree in trees for path in tree.rglob("*.py")]
    return [path for path in found if path != NAMES and "api" not in path.relative_to(ROOT).parts]


def is_module(text: str) -> bool:
    """`meshfire.kv.lease` or `meshfire.api.…` names code, not telemetry."""
    path = ROOT / "libs" / Path(*text.split("."))
    return text.startswith("meshfire.api.") or path.is_dir() or path.with_suffix(".py").is_file()


def looks_like_a_name(value: object) -> bool:
    """Also the first part of an f-string that would build one; not a module, not a file."""
    if not isinstance(value, str) or LIKE_A_NAME.fullmatch(value) is None:
        return False
    return not is_module(value) and not value.endswith(".json")


def docstrings(tree: ast.Module) -> set[int]:
    """Identities of the strings that stand alone as statements."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def offences(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    prose = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in prose and looks_like_a_name(node.value):
            yield f"line {node.lineno}: {node.value!r} belongs in names.py"
        if isinstance(node, ast.Call):
            yield from literal_names(node)


def literal_names(call: ast.Call) -> Iterator[str]:
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = [*call.args[:2], *(keyword.value for keyword in call.keywords if keyword.arg == "name")]
    if function in SPAN_CALLS or INSTRUMENT_CALLS.fullmatch(function):
        for argument in given:
            # the second argument of create_… is the unit; of our start_span and span, the name
            is_unit = INSTRUMENT_CALLS.fullmatch(function) and argument is not given[0]
            if isinstance(argument, ast.Constant | ast.JoinedStr) and not is_unit:
                yield f"line {call.lineno}: {function}() is given a literal name"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_name_is_spelt_outside_names_py(path: Path) -> None:
    assert list(offences(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("source", "num_offences"),
    [
        ("x = {'meshfire.request.id': 1}", 1),
        ("x = f'gen_ai.{kind}'", 1),
        ("start_span(tracer, 'decode.lease')", 1),
        ("spans.span(tracer, name='decode.lease')", 1),
        ("meter.create_counter('tokens', 'By')", 1),
        ("meter.create_counter(names.METRIC_DECODE_TOKENS, 'By')", 0),
        ("start_span(tracer, names.SPAN_DECODE_LEASE, parent=None)", 0),
        ("log = getLogger('meshfire.telemetry.store')", 0),
        ("'''meshfire.model is named in prose'''", 0),
    ],
)
def test_the_check_itself_sees_what_it_should(source: str, num_offences: int) -> None:
    assert len(list(offences(source))) == num_offences


@pytest.mark.parametrize("kind", ["SPAN_", "ATTR_", "METRIC_", "EVENT_"])
def test_no_two_constants_of_a_kind_share_a_name(kind: str) -> None:
    found = names.names_of(kind)
    assert found
    assert len(set(found.values())) == len(found)


def test_names_are_dotted_lower_case() -> None:
    for kind in ("SPAN_", "ATTR_", "METRIC_", "EVENT_"):
        for value in names.names_of(kind).values():
            assert re.fullmatch(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+", value), value


@pytest.mark.parametrize(
    ("kind", "heading"), [("SPAN_", "Spans"), ("ATTR_", "Attributes"), ("METRIC_", "Metrics"), ("EVENT_", "Events")]
)
def test_the_documented_table_lists_exactly_the_declared_names(kind: str, heading: str) -> None:
    page = (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `([a-z0-9_.]+)`", section, flags=re.MULTILINE)
    assert sorted(documented) == sorted(names.names_of(kind).values())
