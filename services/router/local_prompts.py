"""Which prompts a decode worker computes itself, without a prefill worker and its KV on the way.

Owns the limits, as values; where such a prompt then goes is placement's choice.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.router.workers import WorkerFacts

#: of a model that has no prefill workers
UNLIMITED = 1 << 31


@dataclass(frozen=True)
class LocalPrompts:
    """A prompt of which a decode worker lacks at most `max_tokens` is computed there; 0 = none is."""

    max_tokens: int = 0
    #: names of models that have no prefill workers
    without_prefill: frozenset[str] = frozenset()

    def limit(self, model: str) -> int:
        """Tokens that a decode worker may lack of a prompt that it computes."""
        return UNLIMITED if model in self.without_prefill else self.max_tokens

    def serve_alone(self, decode: WorkerFacts) -> bool:
        """Whether a decode worker can take whatever fits it."""
        return self.limit(decode.model) >= decode.context_tokens
