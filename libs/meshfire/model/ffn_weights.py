"""Where the weights of FFNs are in a checkpoint: whole, in slices, or expert by expert.

Owns both layouts of routed experts (one tensor per expert; one stacked tensor per layer) and the cut of a dense FFN
into slices served as experts. Knows nothing of arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshfire.errors import CheckpointError, UnknownExpert
from meshfire.model.compute.interface import Ffn
from meshfire.model.fixed_point import MAX_TERMS
from meshfire.model.interface import ExpertLayout
from meshfire.model.stored import StoredFfn
from meshfire.model.tensors import DecoderTensors, LayerTensors


@dataclass(frozen=True)
class FfnShape:
    """What the FFN of each layer is: `num_experts` > 0 = routed experts of size `expert_size`, else dense."""

    hidden_size: int
    dense_size: int
    expert_size: int
    num_experts: tuple[int, ...]

    def layout(self, dense_slices: int) -> ExpertLayout:
        """The (layer, expert) pairs that a placement must cover. Raises CheckpointError for an impossible cut."""
        if not 0 <= dense_slices <= min(MAX_TERMS, self.dense_size):
            most = min(MAX_TERMS, self.dense_size)
            raise CheckpointError(f"dense_slices is {dense_slices}, expected 0 to {most}", field="dense_slices")
        return ExpertLayout(tuple(count or dense_slices for count in self.num_experts), self.hidden_size)


@dataclass(frozen=True)
class CheckpointExperts:
    """Reads one (layer, expert) pair at a time: an ExpertSource."""

    tensors: DecoderTensors
    shape: FfnShape
    dense_slices: int

    def load(self, layer: int, expert: int) -> Ffn:
        """Read and pack that expert's tensors only. Raises UnknownExpert, CheckpointError."""
        return self.tensors.compute.ffn(self._stored(layer, expert))

    def _stored(self, layer: int, expert: int) -> StoredFfn:
        counts = self.shape.layout(self.dense_slices).num_experts
        if not (0 <= layer < len(counts) and 0 <= expert < counts[layer]):
            raise UnknownExpert(f"the model has no expert {expert} in layer {layer}", field="expert")
        weights = self.tensors.layer(layer)
        if self.shape.num_experts[layer] == 0:
            rows = slice_bounds(self.shape.dense_size, self.dense_slices, expert)
            return weights.ffn("mlp", self.shape.hidden_size, self.shape.dense_size, rows)
        if "mlp.experts.gate_up_proj" in weights:
            return _load_stacked(weights, self.shape, self.shape.num_experts[layer], expert)
        return weights.ffn(f"mlp.experts.{expert}", self.shape.hidden_size, self.shape.expert_size)


def slice_bounds(size: int, num_slices: int, index: int) -> slice:
    """Rows of slice `index` when `size` rows are cut as evenly as possible; the first ones take the remainder."""
    share, spare = divmod(size, num_slices)
    start = index * share + min(index, spare)
    return slice(start, start + share + (index < spare))


def _load_stacked(weights: LayerTensors, shape: FfnShape, num_experts: int, expert: int) -> StoredFfn:
    """From transformers' stacked layout: gate_up_proj [E, 2I, H] (gate first), down_proj [E, H, I]."""
    one = (slice(expert, expert + 1),)
    hidden, inner = shape.hidden_size, shape.expert_size
    gate_up = weights.stored("mlp.experts.gate_up_proj", (num_experts, 2 * inner, hidden), one)[0]
    down = weights.stored("mlp.experts.down_proj", (num_experts, hidden, inner), one)[0]
    gate, up = torch.split(gate_up, inner)
    return StoredFfn.of(gate, up, down)
