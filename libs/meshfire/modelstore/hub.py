"""A model of a Hugging Face hub: its weights, configuration and tokenizer files, verified by the hub's own checksums.

The endpoint and the credentials are the library's business (HF_ENDPOINT, HF_TOKEN). Only files at the top of the
repository are taken, and no code.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

from meshfire.errors import CheckpointError, DataLoss, MeshfireError, Unavailable, UnknownModel
from meshfire.modelstore.manifest import sha256_of
from meshfire.modelstore.progress import Progress, folder_bytes

PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tiktoken.model")
_NESTED = "*/*"
_POLL_S = 0.25


@dataclass(frozen=True)
class HubFile:
    """A file as the hub describes it: git's blob id for small ones, sha256 for those in its large-file store."""

    name: str
    size_bytes: int
    blob_id: str | None
    sha256: str | None


class _NoBar(tqdm):
    """The library's progress bar, unseen: progress goes to our own callback."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class HubSource:
    """One repository at one revision (None = its default branch)."""

    repository: str
    revision: str | None = None
    #: None = the library's setting
    endpoint: str | None = None
    #: finished files and pieces of unfinished ones are found again by the library
    resumable: bool = True

    @property
    def label(self) -> str:
        """As in the manifest."""
        return f"hf:{self.repository}" + (f"@{self.revision}" if self.revision else "")

    def build(self, directory: Path, progress: Progress) -> None:
        """Download what is missing, then verify all. `progress` may be called from another thread."""
        commit, files = self._listing()
        total = sum(file.size_bytes for file in files)
        with _errors_named(self.label), _ticking(lambda: progress("fetch", min(folder_bytes(directory), total), total)):
            snapshot_download(
                self.repository,
                revision=commit,
                local_dir=directory,
                cache_dir=directory / ".cache",  # whatever it keeps besides goes when we are done
                endpoint=self.endpoint,
                allow_patterns=list(PATTERNS),
                ignore_patterns=[_NESTED],
                tqdm_class=_NoBar,
            )
        _verify(directory, files, progress)
        shutil.rmtree(directory / ".cache", ignore_errors=True)

    def _listing(self) -> tuple[str, list[HubFile]]:
        with _errors_named(self.label):
            info = HfApi(endpoint=self.endpoint).model_info(
                self.repository, revision=self.revision, files_metadata=True
            )
        files = [
            HubFile(one.rfilename, one.size or 0, one.blob_id, one.lfs.sha256 if one.lfs else None)
            for one in info.siblings or ()
            if _is_wanted(one.rfilename)
        ]
        names = {file.name for file in files}
        if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
            raise CheckpointError(f"{self.label} has no config.json or no safetensors files")
        if not info.sha:
            raise Unavailable(f"the hub does not name the revision of {self.label}")
        return info.sha, files


def _is_wanted(name: str) -> bool:
    return "/" not in name and any(fnmatch(name, pattern) for pattern in PATTERNS)


def _verify(directory: Path, files: list[HubFile], progress: Progress) -> None:
    """The library returns a folder as it is when the hub goes away half-way: so each file is looked at here."""
    for done, file in enumerate(files):
        progress("verify download", done, len(files))
        path = directory / file.name
        if not path.is_file():
            raise Unavailable(f"{file.name} was not downloaded: try again, it goes on from here")
        if not _matches(path, file):
            path.unlink()  # so that the next attempt fetches it anew
            raise DataLoss(f"{file.name} does not match the hub's checksum: try again")
    progress("verify download", len(files), len(files))


def _matches(path: Path, file: HubFile) -> bool:
    if file.sha256:
        return sha256_of(path) == file.sha256
    if file.blob_id:
        return git_blob_id(path.read_bytes()) == file.blob_id
    return path.stat().st_size == file.size_bytes


def git_blob_id(content: bytes) -> str:
    """Git's name of a blob: sha1 over "blob <size>", a zero byte and the content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@contextmanager
def _errors_named(label: str) -> Iterator[None]:
    try:
        yield
    except MeshfireError:
        raise
    except (RepositoryNotFoundError, RevisionNotFoundError, GatedRepoError) as error:
        raise UnknownModel(f"the hub does not give {label}: {_first_line(error)}", field="source") from error
    except Exception as error:  # the library lets its HTTP client's and the system's errors through, by no common base
        raise Unavailable(f"cannot fetch {label}: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no details")


@contextmanager
def _ticking(tick: Callable[[], None]) -> Iterator[None]:
    """Call `tick` every quarter of a second from a thread of its own while the block runs."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.wait(_POLL_S):
            tick()

    thread = threading.Thread(target=loop, name="pull-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        tick()
