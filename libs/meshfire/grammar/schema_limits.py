"""How large a schema may be. Checked before anything walks through it: the engine is native code with its own stack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshfire.errors import BadInput

#: Objects and lists inside each other.
MAX_DEPTH = 100
#: Values of any kind, all levels together.
MAX_NODES = 20_000


def check_size(schema: Mapping[str, Any], field: str) -> None:
    """Raises BadInput for a schema that is too deep or too large."""
    level: list[Any] = [schema]
    nodes = 0
    for _ in range(MAX_DEPTH):
        nodes += len(level)
        if nodes > MAX_NODES:
            raise BadInput(f"{field}: a schema of more than {MAX_NODES} values", field=field)
        level = [inner for one in level for inner in _inside(one)]
        if not level:
            return
    raise BadInput(f"{field}: a schema of more than {MAX_DEPTH} levels", field=field)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []
