"""Who sent a request, as the doors tell it and the router hears it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

#: call metadata by which the router learns who pays
ACCOUNT_HEADER = "x-meshfire-account"
KEY_HEADER = "x-meshfire-key"
SHARED_PROMPT_HEADER = "x-meshfire-shared-prompt"


@dataclass(frozen=True)
class Visitor:
    """An account and the key that opened it; both empty where no keys are asked for."""

    account_id: str = ""
    key_id: str = ""
    requests_per_minute: int | None = None
    max_concurrent: int | None = None
    #: None = billed beyond the daily free neurons
    free_neurons_per_day: int | None = None

    def metadata(self, *, pays_for_prompt: bool) -> Iterator[tuple[str, str]]:
        """For one Generate call. Of several calls with one prompt, the first pays for it."""
        if self.account_id:
            yield ACCOUNT_HEADER, self.account_id
            yield KEY_HEADER, self.key_id
        if not pays_for_prompt:
            yield SHARED_PROMPT_HEADER, "1"

    def cache_salt(self, asked: str) -> str:
        """Accounts share no prefix cache: how fast an answer comes would tell what others asked."""
        return f"{self.account_id}/{asked}" if self.account_id else asked
