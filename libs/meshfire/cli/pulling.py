"""Pulls with progress in the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from meshfire import modelstore
from meshfire.errors import UnknownModel
from meshfire.modelstore.source import BUILT_IN


def find_or_pull(name_or_directory: str, console: Console) -> Path:
    """A model's directory; a name that is not cached but can be pulled is pulled. Raises UnknownModel."""
    try:
        return modelstore.resolve(name_or_directory)
    except UnknownModel:
        if name_or_directory not in BUILT_IN:
            raise
    return pull(name_or_directory, console)


def pull(spec: str, console: Console, *, name: str | None = None) -> Path:
    """Pull with a progress bar in a terminal, with a line per stage elsewhere."""
    if not console.is_terminal:
        return modelstore.pull(spec, name=name, progress=_Lines(console))
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        return modelstore.pull(spec, name=name, progress=_Bars(bars))


class _Bars:
    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total or None)
        self._bars.update(self._tasks[stage], completed=done, total=total or None)


class _Lines:
    """Tells each stage when it begins, and every quarter of it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told: dict[str, int] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        quarter = 4 * done // total if total else 0
        if self._told.get(stage, -1) < quarter:
            self._told[stage] = quarter
            share = f" {25 * quarter} %" if total else ""
            self._console.print(f"{stage}{share}", highlight=False)
