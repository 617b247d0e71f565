"""The experts in memory: loading, dropping, computing, counting.

Owns their weights. Knows no wire, no epoch and no caller. `forward` runs on the model thread; loading and dropping run
elsewhere beside it, because a layer's experts are replaced as a whole mapping, never changed in place.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from torch import Tensor

from meshfire.errors import BadInput, UnknownExpert
from meshfire.model.compute.interface import Ffn
from meshfire.model.experts import ExpertSource, weighted_sum
from meshfire.model.interface import ExpertLayout
from meshfire.placement.shard_map import Expert


class ExpertStore:
    """What this shard can compute now."""

    def __init__(self, source: ExpertSource, layout: ExpertLayout) -> None:
        self.layout = layout
        self._source = source
        self._layers: Mapping[int, Mapping[int, Ffn]] = {}
        self._changing = threading.Lock()  # a cancelled load still runs to its end on its thread
        #: by layer: tokens per expert since start
        self._num_tokens: list[Counter[int]] = [Counter() for _ in layout.num_experts]

    @property
    def experts(self) -> frozenset[Expert]:
        """Experts in memory."""
        return frozenset((layer, expert) for layer, held in self._layers.items() for expert in held)

    @property
    def weight_bytes(self) -> int:
        """Bytes of their weights."""
        return sum(expert.num_bytes for held in self._layers.values() for expert in held.values())

    def load(self, experts: Iterable[Expert]) -> None:
        """Read what is not in memory yet. Raises UnknownExpert, CheckpointError, and then has loaded nothing."""
        with self._changing:
            missing = sorted(set(experts) - self.experts)
            for layer, expert in missing:
                self._check_expert(layer, expert)
            loaded: dict[int, dict[int, Ffn]] = defaultdict(dict)
            for layer, expert in missing:
                loaded[layer][expert] = self._source.load(layer, expert)
            layers = sorted(self._layers.keys() | loaded.keys())
            self._layers = {layer: {**self._layers.get(layer, {}), **loaded.get(layer, {})} for layer in layers}

    def keep_only(self, experts: frozenset[Expert]) -> None:
        """Drop everything else. A hop that runs keeps what it uses."""
        with self._changing:
            kept = {
                layer: {expert: weights for expert, weights in held.items() if (layer, expert) in experts}
                for layer, held in self._layers.items()
            }
            self._layers = {layer: held for layer, held in kept.items() if held}

    def forward(self, layer: int, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Weighted sum over the chosen experts: [T, H] int64 fixed point.

        `hidden` [T, H] float32 or bfloat16, `topk_ids` [T, K] int32 (-1 = none), `topk_weights` [T, K] float32.
        Raises BadInput for a layer or id that the model does not have, UnknownExpert for one that is not here,
        NonFiniteValue.
        """
        wanted = Counter(topk_ids.flatten().tolist())
        del wanted[-1]
        held = self._check_ids(layer, wanted)
        output = weighted_sum(hidden.float(), topk_ids, topk_weights, held)
        self._num_tokens[layer].update(wanted)
        return output

    def loads(self) -> dict[Expert, int]:
        """Tokens computed since start, of the experts that saw one."""
        counts = [dict(counter) for counter in self._num_tokens]  # at once: the model thread goes on counting
        return {(layer, expert): count for layer, seen in enumerate(counts) for expert, count in seen.items()}

    def _check_ids(self, layer: int, wanted: Counter[int]) -> Mapping[int, Ffn]:
        num_layers = len(self.layout.num_experts)
        if not 0 <= layer < num_layers or not self.layout.num_experts[layer]:
            raise BadInput(f"layer {layer} of {num_layers} has no experts", field="layer")
        held = self._layers.get(layer, {})
        unknown = wanted.keys() - held.keys()
        for expert in sorted(unknown):
            if not 0 <= expert < self.layout.num_experts[layer]:
                count = self.layout.num_experts[layer]
                raise BadInput(f"layer {layer} has {count} experts, got id {expert}", field="topk_ids")
        if unknown:
            raise UnknownExpert(f"layer {layer}: experts {sorted(unknown)[:8]} are not on this shard", field="topk_ids")
        return held

    def _check_expert(self, layer: int, expert: int) -> None:
        counts = self.layout.num_experts
        if not 0 <= layer < len(counts) or not 0 <= expert < counts[layer]:
            raise UnknownExpert(f"the model has no expert {expert} in layer {layer}", field="experts")
