"""docs/compatibility.md says of each parameter what the schema does with it, and the schema has no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pydantic import BaseModel

from services.gateway.openai.marks import Ignored, NotYet, marked
from services.gateway.openai.schema import ChatRequest, CompletionRequest, Message, StreamOptions, TextPart
from services.gateway.openai.tools import Function, ToolCall

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "compatibility.md").read_text()
ENDPOINTS: dict[str, type[BaseModel]] = {"chat": ChatRequest, "completions": CompletionRequest}
NESTED: dict[str, type[BaseModel]] = {
    "stream_options.": StreamOptions,
    "messages[].": Message,
    "messages[].content[].": TextPart,
    "messages[].tool_calls[].": ToolCall,
    "tools[].function.": Function,
}


def rows(heading: str) -> dict[str, list[str]]:
    """First cell (without quotes) → the other cells, of a section's first table."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first.strip("`"): rest for first, *rest in cells}


def where_of(mark: type[Ignored] | type[NotYet]) -> dict[str, str]:
    """Parameter → "chat", "completions" or "both", from the schema."""
    found: dict[str, set[str]] = {}
    for endpoint, model in ENDPOINTS.items():
        for name, _ in marked(model, mark):
            found.setdefault(name, set()).add(endpoint)
    nested = {f"{prefix}{name}": prefix for prefix, model in NESTED.items() for name, _ in marked(model, mark)}
    where = {name: "both" if len(ends) == 2 else next(iter(ends)) for name, ends in found.items()}
    return where | {name: "both" if prefix == "stream_options." else "chat" for name, prefix in nested.items()}


def test_the_ignored_parameters_are_those_of_the_schema() -> None:
    assert {name: cells[0] for name, cells in rows("Ignored").items()} == where_of(Ignored)


def test_the_unsupported_parameters_are_those_of_the_schema() -> None:
    assert {name: cells[0] for name, cells in rows("Not supported yet").items()} == where_of(NotYet)


def test_the_harmless_values_are_those_of_the_schema() -> None:
    models = {"": [ChatRequest, CompletionRequest]} | {prefix: [model] for prefix, model in NESTED.items()}
    harmless = {
        f"{prefix}{name}": tuple(json.dumps(one) for one in mark.harmless)
        for prefix, group in models.items()
        for model in group
        for name, mark in marked(model, NotYet)
    }
    told = {name: tuple(re.findall(r"`([^`]*)`", cells[1])) for name, cells in rows("Not supported yet").items()}
    assert told == harmless


def test_every_used_parameter_is_named() -> None:
    section = PAGE.split("## Used\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = {name for cell in cells for name in re.findall(r"`([^`]*)`", cell)}
    used = {
        name
        for model in ENDPOINTS.values()
        for name in model.model_fields
        if name not in {one for mark in (Ignored, NotYet) for one, _ in marked(model, mark)}
    }
    assert named == used
