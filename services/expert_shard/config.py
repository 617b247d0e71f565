"""Settings of an expert shard (environment prefix MESHFIRE_EXPERT_SHARD_)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from meshfire.model.compute.names import ComputeName
from meshfire.model.interface import ExpertLayout
from meshfire.placement.shard_map import Expert
from meshfire.runtime.settings import ServiceSettings, settings_config

_RANGE = re.compile(r"(?P<layer>\*|\d+):(?P<first>\d+)-(?P<last>\d+)")


class ExpertShardSettings(ServiceSettings):
    """Which experts of which model."""

    model_config = settings_config("MESHFIRE_EXPERT_SHARD_")

    #: Name under which the model is served.
    model: str = Field(min_length=1)
    #: Hugging Face directory of the model; only this shard's tensors are read.
    model_dir: Path
    #: Name in the placement document.
    shard_id: str = Field(min_length=1)
    #: Slices into which dense FFNs are cut; 0 = they are not served here. Same in the whole mesh.
    dense_slices: int = Field(default=0, ge=0)
    #: Experts to hold besides those of the placement document, as LAYER:FIRST-LAST, comma-separated; layer * = all that
    #: have such experts. If set, the start does not wait for the document.
    experts: str = ""
    #: How matrix products are computed; auto = at the checkpoint's precision. Same in the whole mesh.
    compute: ComputeName = "auto"
    #: Threads of one matrix product.
    num_threads: int = Field(default=1, ge=1)
    #: auto = callers on this machine may send hops over a local socket (ADR 11); grpc = all hops come over gRPC.
    hop_transport: Literal["auto", "grpc"] = "auto"
    #: Hops read ahead per caller.
    max_queued_hops: int = Field(default=64, ge=1)
    #: How long a hop of an epoch that this shard has not heard of waits for the document.
    epoch_wait_s: float = Field(default=2.0, ge=0)
    #: A trace without hops for this long is closed.
    span_silence_s: float = Field(default=2.0, gt=0)

    @field_validator("experts")
    @classmethod
    def _is_ranges(cls, text: str) -> str:
        for one in _split(text):
            found = _RANGE.fullmatch(one)
            if found is None or int(found["first"]) > int(found["last"]):
                raise ValueError(f"{one!r} is not LAYER:FIRST-LAST")
        return text

    def own_experts(self, layout: ExpertLayout) -> frozenset[Expert]:
        """The experts that `experts` names, as far as the model has them."""
        found: set[Expert] = set()
        for one in _split(self.experts):
            named, first, last = one.replace("-", ":").split(":")
            for layer, num_experts in enumerate(layout.num_experts):
                if named in ("*", str(layer)):
                    found.update((layer, expert) for expert in range(int(first), min(int(last) + 1, num_experts)))
        return frozenset(found)


def _split(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]
