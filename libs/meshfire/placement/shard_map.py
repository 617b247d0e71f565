"""Which shards hold which expert: the placement document as a value.

Owns the document's form, its checks and the even spread of a new one. Does not know where the document is stored, where
shards live or which of them are alive. Layers and experts are logical ids, as in the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshfire.errors import InvalidPlacement

if TYPE_CHECKING:  # the model package needs torch, a process that only writes placements does not
    from meshfire.model.interface import ExpertLayout

#: shard ids that hold a copy of one expert; any of them may be asked
Replicas = tuple[str, ...]
#: (layer, expert)
Expert = tuple[int, int]


def placement_key(model: str) -> str:
    """Where discovery's key-value store keeps the placement document of a model."""
    return f"meshfire/placement/{model}"


@dataclass(frozen=True)
class ExpertSpan:
    """A contiguous run of experts of one layer."""

    layer: int
    first: int
    count: int

    def experts(self) -> frozenset[Expert]:
        """Its members."""
        return frozenset((self.layer, expert) for expert in range(self.first, self.first + self.count))


@dataclass(frozen=True)
class ShardMap:
    """One version of a model's placement. Every layer's experts have at least one replica each."""

    epoch: int
    model: str
    model_revision: str
    #: by layer, by expert; a layer without experts has none
    layers: tuple[tuple[Replicas, ...], ...]

    @property
    def shard_ids(self) -> tuple[str, ...]:
        """Every shard that holds something, sorted."""
        return tuple(sorted({shard for layer in self.layers for replicas in layer for shard in replicas}))

    def experts_of(self, shard_id: str) -> frozenset[Expert]:
        """What one shard holds."""
        return frozenset(
            (layer, expert)
            for layer, experts in enumerate(self.layers)
            for expert, replicas in enumerate(experts)
            if shard_id in replicas
        )

    def covers(self, layout: ExpertLayout) -> bool:
        """Whether exactly the layout's experts are placed."""
        return tuple(len(experts) for experts in self.layers) == layout.num_experts

    def to_json(self) -> bytes:
        """The document, UTF-8."""
        document = {
            "epoch": self.epoch,
            "model": self.model,
            "model_revision": self.model_revision,
            "layers": self.layers,
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, document: bytes) -> ShardMap:
        """Read and check a document. Raises InvalidPlacement, which names the field."""
        try:
            fields = json.loads(document)
        except ValueError as error:
            raise InvalidPlacement(f"the placement document is not JSON: {error}", field="document") from None
        if not isinstance(fields, Mapping):
            raise _wrong("document", fields, "an object")
        return cls(
            epoch=_epoch(fields.get("epoch")),
            model=_name("model", fields.get("model")),
            model_revision=_name("model_revision", fields.get("model_revision")),
            layers=tuple(_layer(index, layer) for index, layer in enumerate(_list("layers", fields.get("layers")))),
        )


def spread(
    layout: ExpertLayout, shard_ids: Sequence[str], *, epoch: int, model: str, revision: str, replicas: int = 1
) -> ShardMap:
    """Place a model evenly: contiguous runs per layer, and `replicas` copies on neighbouring shards.

    Per layer no shard holds more than one expert above another (times `replicas`); over all layers neither, because
    the shard that gets the remainder moves on from layer to layer. Raises InvalidPlacement.
    """
    if not shard_ids or len(set(shard_ids)) != len(shard_ids):
        raise InvalidPlacement(f"shard ids must be one or more and distinct, got {list(shard_ids)}", field="shard_ids")
    if not 1 <= replicas <= len(shard_ids):
        raise InvalidPlacement(f"{replicas} replicas need as many shards, got {len(shard_ids)}", field="replicas")
    layers, next_extra = [], 0
    for num_experts in layout.num_experts:
        homes = _homes(num_experts, len(shard_ids), next_extra)
        layers.append(tuple(_copies(home, shard_ids, replicas) for home in homes))
        next_extra = (next_extra + num_experts) % len(shard_ids)
    return ShardMap(epoch, model, revision, tuple(layers))


def spans_of(experts: Iterable[Expert]) -> tuple[ExpertSpan, ...]:
    """Experts as contiguous runs, ascending."""
    spans: list[ExpertSpan] = []
    for layer, expert in sorted(experts):
        last = spans[-1] if spans else None
        if last is not None and last.layer == layer and last.first + last.count == expert:
            spans[-1] = ExpertSpan(layer, last.first, last.count + 1)
        else:
            spans.append(ExpertSpan(layer, expert, 1))
    return tuple(spans)


def _homes(num_experts: int, num_shards: int, next_extra: int) -> list[int]:
    """Shard index of each expert. The remainder goes to the shards from `next_extra` on, one each."""
    share, extra = divmod(num_experts, num_shards)
    sizes = [share + ((shard - next_extra) % num_shards < extra) for shard in range(num_shards)]
    return [shard for shard, size in enumerate(sizes) for _ in range(size)]


def _copies(home: int, shard_ids: Sequence[str], replicas: int) -> Replicas:
    return tuple(shard_ids[(home + step) % len(shard_ids)] for step in range(replicas))


def _epoch(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise _wrong("epoch", value, "an integer from 1 on")
    return value


def _name(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(field, value, "a text that is not empty")
    return value


def _list(field: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(field, value, "a list")
    return value


def _layer(index: int, value: Any) -> tuple[Replicas, ...]:
    field = f"layers[{index}]"
    return tuple(_replicas(f"{field}[{expert}]", one) for expert, one in enumerate(_list(field, value)))


def _replicas(field: str, value: Any) -> Replicas:
    replicas = tuple(_name(f"{field}[{index}]", one) for index, one in enumerate(_list(field, value)))
    if not replicas or len(set(replicas)) != len(replicas):
        raise _wrong(field, value, "one or more distinct shard ids")
    return replicas


def _wrong(field: str, value: Any, expected: str) -> InvalidPlacement:
    return InvalidPlacement(f"placement: {field} is {str(value)[:80]!r}, expected {expected}", field=field)
