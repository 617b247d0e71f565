"""What an architecture's file gives to the registry: facts of a configuration, and a way to build it.

Owns no architecture. Adding one = one file with a `parse` function and one registry line.
"""

from __future__ import annotations

from typing import Protocol

from meshfire.model.ffn_weights import FfnShape
from meshfire.model.interface import CausalLM
from meshfire.model.partition import KvColumns
from meshfire.model.tensors import DecoderTensors


class ModelSpec(Protocol):
    """A parsed configuration."""

    @property
    def vocab_size(self) -> int:
        """V."""

    @property
    def context_tokens(self) -> int:
        """Positions the model was made for."""

    @property
    def ffn(self) -> FfnShape:
        """The FFN of every layer."""

    @property
    def window_tokens(self) -> int:
        """How many tokens a token sees, itself included; 0 = all."""

    @property
    def kv(self) -> KvColumns:
        """The KV row of a token and layer."""

    def build(self, tensors: DecoderTensors, *, dense_slices: int, block_tokens: int) -> CausalLM:
        """Load everything but routed experts and FFN slices. Raises CheckpointError."""
