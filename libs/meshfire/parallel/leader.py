"""Rank 0's model: an ordinary CausalLM whose every call runs on all ranks.

Owns the order of commands. Must be called from one thread, the model thread of its worker.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from meshfire.errors import RankLost
from meshfire.kv.store import KvStore
from meshfire.model.interface import CausalLM, ExpertBackend, ForwardBatch, KvView
from meshfire.parallel.commands import Command, encode_batch, header
from meshfire.parallel.experts import LeaderExperts
from meshfire.parallel.group import RankGroup
from meshfire.parallel.kv_memory import RankKv


class LeaderModel:
    """`share` is rank 0's part of the model, `store` the cache of whole rows that all ranks share."""

    def __init__(self, share: CausalLM, store: KvStore, kv: RankKv, group: RankGroup) -> None:
        self.geometry = store.geometry
        self.hidden_size = share.hidden_size
        self.vocab_size = share.vocab_size
        self.context_tokens = share.context_tokens
        self.experts = share.experts
        self._share, self._store, self._kv, self._group = share, store, kv, group
        self._lost: RankLost | None = None

    def forward(self, batch: ForwardBatch, kv: KvView, experts: ExpertBackend) -> Tensor:
        """As CausalLM; `kv` is the shared store. Raises RankLost, and then always: the worker must start anew."""
        assert kv is self._store, "ranks know no other cache"
        return self._on_all_ranks(lambda: self._forward(batch, experts))

    def logits(self, hidden: Tensor) -> Tensor:
        """As CausalLM. Raises RankLost."""
        return self._on_all_ranks(lambda: self._logits(hidden))

    def stop(self) -> None:
        """Let the other ranks end."""
        if self._lost is None:
            self._on_all_ranks(lambda: self._group.broadcast(header(Command.STOP)))

    def _forward(self, batch: ForwardBatch, experts: ExpertBackend) -> Tensor:
        encoded = encode_batch(batch)
        self._group.broadcast(header(Command.FORWARD, encoded.shape[0]))
        self._group.broadcast(encoded)
        return self._share.forward(batch, self._kv, LeaderExperts(experts, self._group))

    def _logits(self, hidden: Tensor) -> Tensor:
        self._group.broadcast(header(Command.LOGITS, *hidden.shape))
        return self._share.logits(self._group.broadcast(hidden.contiguous()))

    def _on_all_ranks(self, call: Callable[[], Tensor]) -> Tensor:
        if self._lost is not None:
            raise self._lost
        try:
            return call()
        except RankLost as error:
            self._lost = error
            raise
