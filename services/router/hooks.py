"""Test hooks of one call: what x-meshfire-script and x-meshfire-fault ask for (docs/test-hooks.md).

Owns the headers' outer form and the switch. What a script's JSON means is the tokenizer's business.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from dataclasses import dataclass

from meshfire.errors import BadInput, TestHooksOff
from meshfire.worker.faults import parse_fault

SCRIPT_HEADER = "x-meshfire-script"
FAULT_HEADER = "x-meshfire-fault"


@dataclass(frozen=True)
class Hooks:
    """What to rehearse. None and "" = nothing."""

    script_json: str | None = None
    fault: str = ""


def hooks_in(metadata: Iterable[tuple[str, str | bytes]], *, allowed: bool) -> Hooks:
    """The hooks of a call. TestHooksOff if there is one and the mesh runs without; BadInput names the header."""
    found = {key: value for key, value in metadata if key in (SCRIPT_HEADER, FAULT_HEADER)}
    if found and not allowed:
        raise TestHooksOff(f"{', '.join(sorted(found))}: this mesh runs without test hooks")
    script = found.get(SCRIPT_HEADER)
    return Hooks(None if script is None else _script_json(_text(script)), _fault(_text(found.get(FAULT_HEADER, ""))))


def _script_json(value: str) -> str:
    try:
        script = base64.b64decode(value, validate=True).decode()
        document = json.loads(script)
    except (binascii.Error, ValueError, RecursionError) as error:
        raise BadInput(f"{SCRIPT_HEADER} is not base64 of JSON: {error}", field=SCRIPT_HEADER) from None
    if not isinstance(document, dict):
        raise BadInput(f"{SCRIPT_HEADER} is not a JSON object", field=SCRIPT_HEADER)
    return script


def _fault(value: str) -> str:
    try:
        parse_fault(value)
    except BadInput as error:
        raise BadInput(f"{FAULT_HEADER}: {error.message}", field=FAULT_HEADER) from None
    return value


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "replace")
