"""A short digest of what a model directory computes: two processes with the same digest run the same model.

Owns what goes in: config.json, safetensors headers, file sizes, samples of the data, the cut of dense FFNs, the path.
Cheap by design (at most 1 MiB of data per file), so it finds other weights, not a single flipped bit.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from meshfire.errors import CheckpointError
from meshfire.model.checkpoint import Header, read_headers

_DIGEST_LETTERS = 16
_WINDOW_BYTES = 64 * 1024
_NUM_WINDOWS = 16


def model_revision(directory: Path, *, dense_slices: int = 0, compute: str = "fp32") -> str:
    """16 hex letters. Workers and shards must agree on `dense_slices` and `compute` too, so both are part of it."""
    digest = hashlib.sha256(f"dense_slices={dense_slices},compute={compute}".encode())
    try:
        digest.update((directory / "config.json").read_bytes())
        for header in read_headers(directory):
            _add_file(digest, header)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error}", field="config.json") from error
    return digest.hexdigest()[:_DIGEST_LETTERS]


def _add_file(digest: hashlib._Hash, header: Header) -> None:
    """Name, size, header, and windows spread evenly from the first to the last byte of data."""
    digest.update(f"{header.path.name}:{header.file_bytes}:".encode())
    digest.update(header.raw)
    last = max(header.data_start, header.file_bytes - _WINDOW_BYTES)
    with header.path.open("rb") as file:
        for window in range(_NUM_WINDOWS):
            file.seek(header.data_start + (last - header.data_start) * window // (_NUM_WINDOWS - 1))
            digest.update(file.read(_WINDOW_BYTES))
