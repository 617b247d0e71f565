"""Makes a model appear in the cache at once or not at all, whatever kills the process in between.

The work is done in a `.partial-…` folder under the model's lock and renamed when its manifest is on the disk. Knows
nothing of where models come from.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshfire.errors import CheckpointError
from meshfire.modelstore import manifest
from meshfire.modelstore.cache import Cache
from meshfire.modelstore.progress import Progress

log = logging.getLogger(__name__)


@contextmanager
def locked(cache: Cache, name: str, progress: Progress) -> Iterator[None]:
    """Hold the model's lock. Waits for another process (or thread) that has it; the system frees it on any death."""
    cache.models.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(cache.lock_file(name), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("wait for another pull", 0, 0)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def installed(cache: Cache, name: str, *, deep: bool, progress: Progress) -> manifest.Manifest | None:
    """The manifest of a sound model; None if there is no such model or, said in the log, a damaged one."""
    directory = cache.model(name)
    if not directory.is_dir():
        return None
    try:
        found = manifest.read(directory)
    except CheckpointError as error:
        log.warning("%s is damaged and will be made again: %s", name, error)
        return None
    if wrong := manifest.damage(directory, found, deep=deep, progress=progress):
        log.warning("%s is damaged and will be made again: %s", name, wrong)
        return None
    return found


def install(
    cache: Cache,
    name: str,
    source: str,
    build: Callable[[Path, Progress], None],
    *,
    resumable: bool,
    progress: Progress,
) -> Path:
    """Let `build` fill a folder, then make it the model `name`. To be called under the lock.

    A failed build leaves nothing, unless it is resumable: then its folder stays for the next attempt.
    """
    partial = cache.partial(name, resumable=resumable)
    cache.sweep(name, keep=partial)
    partial.mkdir(parents=True, exist_ok=True)
    try:
        build(partial, progress)
        manifest.write(partial, name, source, progress)
    except BaseException:
        if not resumable:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    _swap(cache, name, partial)
    return cache.model(name)


def uninstall(cache: Cache, name: str) -> None:
    """Delete a model and what attempts at it left. To be called under the lock."""
    if cache.model(name).is_dir():
        os.rename(cache.model(name), cache.trash(name))
    cache.sweep(name)


def _swap(cache: Cache, name: str, partial: Path) -> None:
    if cache.model(name).exists():
        os.rename(cache.model(name), cache.trash(name))
    os.rename(partial, cache.model(name))
    cache.sweep(name)
