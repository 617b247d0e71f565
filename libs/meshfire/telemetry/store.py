"""Recent traces as files, one per trace: `<directory>/<trace id>.jsonl`, one span a line.

Owns the bounds (traces, bytes of a trace, bytes in all) and reading while another process writes: lines are appended
whole, and a reader skips a last line that is not complete. One writer per directory. Blocking; knows no gRPC.
"""

from __future__ import annotations

import logging
import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshfire.errors import BadInput, NotFound
from meshfire.telemetry.record import SpanRecord

log = logging.getLogger(__name__)

MAX_TRACES = 200
MAX_TRACE_BYTES = 4 << 20
MAX_BYTES = 128 << 20
LAST = "last"
_SUFFIX = ".jsonl"
_FILE = re.compile(r"[0-9a-f]{32}\.jsonl")


@dataclass(frozen=True)
class Bounds:
    """What a store may hold; the oldest written trace goes first."""

    max_traces: int = MAX_TRACES
    max_trace_bytes: int = MAX_TRACE_BYTES
    max_bytes: int = MAX_BYTES


class TraceWriter:
    """Appends spans; takes over what an earlier run left in the directory."""

    def __init__(self, directory: Path, bounds: Bounds | None = None) -> None:
        self._directory = directory
        self._bounds = bounds or Bounds()
        directory.mkdir(parents=True, exist_ok=True)
        # trace id → bytes, least recently written first
        self._sizes = OrderedDict((path.stem, path.stat().st_size) for path in reversed(newest_first(directory)))
        self._num_bytes = sum(self._sizes.values())

    def add(self, spans: Iterable[SpanRecord]) -> None:
        """Keep them, and drop the oldest traces beyond the bounds."""
        lines: dict[str, list[bytes]] = {}
        for span in spans:
            lines.setdefault(span.trace_id, []).append(span.to_line())
        for trace_id, of_trace in lines.items():
            self._append(trace_id, of_trace)
        self._evict()

    def _append(self, trace_id: str, lines: Sequence[bytes]) -> None:
        size = self._sizes.get(trace_id, 0)
        block = b"".join(lines)
        if size + len(block) > self._bounds.max_trace_bytes:
            log.warning("trace %s is too big for the local store; %d spans left out", trace_id, len(lines))
            return
        # One write of whole lines to a file opened for appending: a reader sees it whole or cut at its end.
        handle = os.open(self._directory / f"{trace_id}{_SUFFIX}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, block)
        finally:
            os.close(handle)
        self._sizes[trace_id] = size + len(block)
        self._sizes.move_to_end(trace_id)
        self._num_bytes += len(block)

    def _evict(self) -> None:
        while self._sizes and (len(self._sizes) > self._bounds.max_traces or self._num_bytes > self._bounds.max_bytes):
            trace_id, size = self._sizes.popitem(last=False)
            self._num_bytes -= size
            (self._directory / f"{trace_id}{_SUFFIX}").unlink(missing_ok=True)


def newest_first(directory: Path) -> list[Path]:
    """The files of the stored traces, most recently written first."""
    found: list[tuple[int, Path]] = []
    for path in directory.glob(f"*{_SUFFIX}"):
        if _FILE.fullmatch(path.name):
            try:
                found.append((path.stat().st_mtime_ns, path))
            except FileNotFoundError:
                continue  # evicted just now
    return [path for _, path in sorted(found, reverse=True)]


def read_trace(path: Path) -> list[SpanRecord]:
    """Its spans in order of arrival. A last line still being written, and a line cut by a full disk, are left out."""
    complete, _, _ = path.read_bytes().rpartition(b"\n")
    spans: list[SpanRecord] = []
    for line in complete.splitlines():
        try:
            spans.append(SpanRecord.from_line(line))
        except BadInput as error:
            log.warning("%s: %s", path.name, error)
    return spans


def find_trace(directory: Path, id_prefix: str) -> list[SpanRecord]:
    """The spans of the one trace whose id starts with `id_prefix`, or of the newest for "last".

    Raises NotFound if there is none, BadInput if several match."""
    wanted = id_prefix.strip().lower()
    paths = newest_first(directory)
    matching = paths[:1] if wanted == LAST else [path for path in paths if path.stem.startswith(wanted)]
    if not matching or not wanted:
        raise NotFound(f"no trace {id_prefix!r} among the {len(paths)} stored in {directory}")
    if len(matching) > 1:
        some = ", ".join(path.stem[: len(wanted) + 4] for path in matching[:4])
        raise BadInput(f"{len(matching)} traces start with {id_prefix!r} ({some} …); give more digits", field="trace")
    try:
        return read_trace(matching[0])
    except FileNotFoundError as error:
        raise NotFound(f"trace {matching[0].stem} has just made room for newer ones") from error
