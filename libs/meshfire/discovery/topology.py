"""The files behind `static:`, one topology file that people write and one directory that processes write.

    topology.json          {"instances": [{"service", "instance_id", "address", "metadata"}], "kv": {key: value}}
    topology.json.d/
        instances/<id>     one JSON object per live registration, with its process; left out once that process is gone
        kv/<key>           8 bytes big-endian index, then the value
        lock               held (flock) by a writer of kv/, so that compare-and-set holds between processes

Owns formats and atomicity: every file appears whole, by rename. Blocking; knows neither watching nor asyncio.
A live registration or document hides one of the same id or key in the topology file, whose documents have index 1.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from meshfire.discovery.base import Instance, KvEntry
from meshfire.discovery.process import ProcessMark
from meshfire.errors import BadInput

SEED_INDEX = 1
_INDEX_BYTES = 8
_SETTLED_NS = 100_000_000


@dataclass(frozen=True)
class _Registration:
    instance: Instance
    #: None for those of the topology file, which nobody vouches for
    mark: ProcessMark | None

    def is_alive(self) -> bool:
        return self.mark is None or self.mark.is_alive()


class TopologyFiles:
    """Reads and writes; a missing topology file is an empty one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._instances = Path(f"{path}.d") / "instances"
        self._kv = Path(f"{path}.d") / "kv"
        self._cached: tuple[tuple[int, int], tuple[_Registration, ...]] | None = None

    def write_instance(self, instance: Instance, mark: ProcessMark) -> None:
        fields = {
            "service": instance.service,
            "instance_id": instance.instance_id,
            "address": instance.address,
            "metadata": dict(instance.metadata),
            "process": {"pid": mark.pid, "started": mark.started},
        }
        _write_whole(self._instances / _file_name(instance.instance_id), json.dumps(fields).encode())

    def remove_instance(self, instance_id: str) -> None:
        (self._instances / _file_name(instance_id)).unlink(missing_ok=True)

    def instances_of(self, service: str) -> tuple[Instance, ...]:
        """Ordered by id; those of dead processes left out. Raises BadInput for a file that cannot be read."""
        found = [one for one in self._registrations() if one.instance.service == service and one.is_alive()]
        return tuple(sorted((one.instance for one in found), key=lambda one: one.instance_id))

    def read_kv(self, key: str) -> KvEntry | None:
        try:
            raw = (self._kv / _file_name(key)).read_bytes()
        except FileNotFoundError:
            return self._seed_kv(key)
        return KvEntry(raw[_INDEX_BYTES:], int.from_bytes(raw[:_INDEX_BYTES], "big"))

    def write_kv(self, key: str, value: bytes, expected_index: int | None) -> bool:
        """Compare-and-set between all processes of this machine."""
        with self._locked():
            entry = self.read_kv(key)
            index = entry.index if entry else 0
            if expected_index is not None and expected_index != index:
                return False
            _write_whole(self._kv / _file_name(key), (index + 1).to_bytes(_INDEX_BYTES, "big") + value)
            return True

    def _registrations(self) -> tuple[_Registration, ...]:
        """Parsed again only if a file changed: every rename moves the directory's modification time."""
        version = (_mtime_ns(self.path), _mtime_ns(self._instances))
        if self._cached is not None and self._cached[0] == version:
            return self._cached[1]
        seeds = {one.instance_id: _Registration(one, None) for one in map(_instance_from, self._seed_list())}
        live = {one.instance.instance_id: one for one in map(_registration_from, self._live())}
        found = tuple((seeds | live).values())
        # A change within the same tick of the clock would not move the time again: trust only what has settled.
        self._cached = (version, found) if time.time_ns() - max(version) > _SETTLED_NS else None
        return found

    def _seed_list(self) -> list[Any]:
        return list(self._seeds().get("instances", []))

    def _seeds(self) -> dict[str, Any]:
        try:
            seeds = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise BadInput(f"{self.path}: not JSON: {error}", field="registry_url") from error
        if not isinstance(seeds, dict):
            raise BadInput(f"{self.path}: expected an object with instances and kv", field="registry_url")
        return seeds

    def _seed_kv(self, key: str) -> KvEntry | None:
        documents = self._seeds().get("kv", {})
        if key not in documents:
            return None
        value = documents[key]
        text = value if isinstance(value, str) else json.dumps(value)
        return KvEntry(text.encode(), SEED_INDEX)

    def _live(self) -> Iterator[Mapping[str, Any]]:
        try:
            names = sorted(os.listdir(self._instances))
        except FileNotFoundError:
            return
        for name in names:
            if name.startswith("."):
                continue  # being written
            try:
                yield json.loads((self._instances / name).read_bytes())
            except FileNotFoundError:
                continue  # deregistered between the listing and the read

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._kv.mkdir(parents=True, exist_ok=True)
        with (self._kv.parent / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by the close, also when the process dies
            yield


def _instance_from(fields: Mapping[str, Any]) -> Instance:
    try:
        metadata = {str(key): str(value) for key, value in fields.get("metadata", {}).items()}
        return Instance(str(fields["service"]), str(fields["instance_id"]), str(fields["address"]), metadata)
    except (AttributeError, KeyError, TypeError) as error:
        raise BadInput(
            f"an instance needs service, instance_id and address; got {fields!r}", field="instances"
        ) from error


def _registration_from(fields: Mapping[str, Any]) -> _Registration:
    try:
        mark = ProcessMark(int(fields["process"]["pid"]), int(fields["process"]["started"]))
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"a live registration names its process; got {fields!r}", field="process") from error
    return _Registration(_instance_from(fields), mark)


def _mtime_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _file_name(text: str) -> str:
    """One path component, reversible and never hidden: escapes slashes and a leading dot."""
    return "=" + quote(text, safe="")


def _write_whole(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
