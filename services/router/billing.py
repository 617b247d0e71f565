"""Who pays for a request, and what it costs.

Owns the call metadata by which a gateway names the payer; a caller who sends none pays for nobody. Money is counted in
micro-neurons (meshfire.metering). Only what was delivered is billed: a request that failed for the mesh's own fault
costs nothing, one that its client cancelled or let run out of time costs what it got.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshfire.api.router.v1 import inference_service_pb2 as pb
from meshfire.errors import Cancelled, DeadlineExceeded
from meshfire.metering.neurons import FREE, Tokens, micro_neurons
from meshfire.metering.prices import PriceTable
from services.router.output import FinishReason

ACCOUNT_HEADER = "x-meshfire-account"
KEY_HEADER = "x-meshfire-key"
#: "1" = another call of the same HTTP request pays for the prompt, which both share
SHARED_PROMPT_HEADER = "x-meshfire-shared-prompt"

_BILLED = {reason.value for reason in FinishReason} | {Cancelled.reason, DeadlineExceeded.reason}


@dataclass(frozen=True)
class Payer:
    """ "" = nobody: development."""

    account_id: str = ""
    key_id: str = ""
    pays_for_prompt: bool = True


def payer_in(metadata: Iterable[tuple[str, str | bytes]]) -> Payer:
    """What a call's metadata says."""
    found: Mapping[str, str] = {key: value for key, value in metadata if isinstance(value, str)}
    shared = found.get(SHARED_PROMPT_HEADER) == "1"
    return Payer(found.get(ACCOUNT_HEADER, ""), found.get(KEY_HEADER, ""), not shared)


@dataclass(frozen=True)
class Bill:
    """What one request is charged with."""

    tokens: Tokens
    reasoning_tokens: int
    micro_neurons: int


def is_billed(outcome: str) -> bool:
    """Whether a request with this end costs anything: a finish reason or an error's reason."""
    return outcome in _BILLED


def bill_for(usage: pb.Usage, payer: Payer, model: str, prices: PriceTable) -> Bill:
    """The prompt counts only for who pays for it. A model without a price is free."""
    prompt = usage.num_prompt_tokens if payer.pays_for_prompt else 0
    tokens = Tokens(prompt, min(usage.num_cached_tokens, prompt), usage.num_output_tokens)
    return Bill(tokens, usage.num_reasoning_tokens, micro_neurons(tokens, prices.rate(model) or FREE))
