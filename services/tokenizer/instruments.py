"""The metrics of the tokenizer service."""

from __future__ import annotations

from opentelemetry.metrics import Meter

from meshfire.telemetry import names


class TokenizerInstruments:
    """Counts tokens by model and method."""

    def __init__(self, meter: Meter) -> None:
        self._tokens = meter.create_counter(names.METRIC_TOKENIZER_TOKENS, "{token}", "Tokens encoded and decoded")

    def tokens(self, model: str, method: str, count: int) -> None:
        """Tokens that `method` (Tokenize, Detokenize) made or read."""
        self._tokens.add(count, {names.ATTR_MODEL: model, names.ATTR_RPC_METHOD: method})
