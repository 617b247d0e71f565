"""`meshfire.json`: what a finished model consists of. Written last, so a folder that has it is complete."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from meshfire.errors import CheckpointError
from meshfire.modelstore.progress import Progress, silent

FILE_NAME = "meshfire.json"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileFacts:
    """One file, as it was when the model was finished."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a finished model is, where it came from, and its files by path inside the folder."""

    name: str
    source: str
    created: str
    files: Mapping[str, FileFacts]

    @property
    def size_bytes(self) -> int:
        """Sum over the files."""
        return sum(facts.size_bytes for facts in self.files.values())


def write(directory: Path, name: str, source: str, progress: Progress = silent) -> Manifest:
    """Take stock of the folder, make its files durable and write the manifest."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != FILE_NAME)
    total, done = sum(path.stat().st_size for path in paths), 0
    files = {}
    for path in paths:
        progress("checksum", done, total)
        facts = facts_of(path)
        _sync(path)
        files[path.relative_to(directory).as_posix()] = facts
        done += facts.size_bytes
    progress("checksum", done, total)
    manifest = Manifest(name, source, datetime.now(UTC).isoformat(timespec="seconds"), files)
    (directory / FILE_NAME).write_text(_to_json(manifest), encoding="utf-8")
    _sync(directory / FILE_NAME)
    _sync(directory)
    return manifest


def read(directory: Path) -> Manifest:
    """The folder's manifest. Raises CheckpointError if there is none that can be read."""
    path = directory / FILE_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        files = {name: FileFacts(int(f["size_bytes"]), str(f["sha256"])) for name, f in content["files"].items()}
        return Manifest(str(content["name"]), str(content["source"]), str(content["created"]), files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}): pull the model again"
        ) from None


def damage(directory: Path, manifest: Manifest, *, deep: bool, progress: Progress = silent) -> str | None:
    """What is wrong with the folder, or None. `deep` reads every byte, else only the sizes are compared."""
    done = 0
    for name, facts in manifest.files.items():
        progress("verify", done, manifest.size_bytes)
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != facts.size_bytes:
            return f"{name} has {path.stat().st_size} bytes instead of {facts.size_bytes}"
        if deep and sha256_of(path) != facts.sha256:
            return f"{name} does not match its sha256"
        done += facts.size_bytes
    progress("verify", done, manifest.size_bytes)
    return None


def facts_of(path: Path) -> FileFacts:
    """Size and checksum of a file."""
    return FileFacts(path.stat().st_size, sha256_of(path))


def sha256_of(path: Path) -> str:
    """Hex digest of the file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _to_json(manifest: Manifest) -> str:
    files = {name: {"size_bytes": f.size_bytes, "sha256": f.sha256} for name, f in manifest.files.items()}
    head = {"name": manifest.name, "source": manifest.source, "created": manifest.created}
    return json.dumps({**head, "files": files}, indent=2) + "\n"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
