"""The door that asks for an API token: who it belongs to, requests per minute, requests at once, daily free neurons.

Owns the order of the checks and their refusals. Keys, counters and the ledger are the store's: several gateways on one
store hold one limit together; requests at once are counted per gateway. A revoked key is refused from the next request
on. When the store cannot be used, nobody is let in unchecked: 503.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from starlette.datastructures import Headers

from meshfire.metering.neurons import FREE_NEURONS_PER_DAY, MICRO
from meshfire.store.accounts import Accounts, Plan
from meshfire.store.clock import Clock, seconds_to_midnight, utc_day, wall_clock
from meshfire.store.ledger import Ledger
from meshfire.store.request_windows import RequestWindows
from services.gateway.access.visitor import Visitor
from services.gateway.errors import HttpError

#: the scope of every model without a limit of its own
SHARED_SCOPE = "text-generation"


class KeyedDoor:
    """`model_limits`: requests per minute of single models, which then do not count for the shared limit."""

    def __init__(
        self,
        accounts: Accounts,
        windows: RequestWindows,
        ledger: Ledger,
        *,
        requests_per_minute: int,
        model_limits: Mapping[str, int],
        max_concurrent: int,
        clock: Clock = wall_clock,
    ) -> None:
        self._accounts = accounts
        self._windows = windows
        self._ledger = ledger
        self._requests_per_minute = requests_per_minute
        self._model_limits = dict(model_limits)
        self._max_concurrent = max_concurrent
        self._clock = clock
        self._active: Counter[str] = Counter()

    async def enter(self, headers: Headers, account_id: str | None = None) -> Visitor:
        """The token's account. Raises HttpError 401 for no or a wrong token, 403 for another account's path."""
        token = token_in(headers)
        caller = await self._accounts.caller(token) if token else None
        if caller is None:
            what = "the API token is not valid" if token else "no API token: send `Authorization: Bearer …`"
            raise HttpError(401, what, "authorization", "invalid_api_key", headers={"www-authenticate": "Bearer"})
        account = caller.account
        if account_id is not None and account_id != account.account_id:
            raise HttpError(403, "the API token belongs to another account", "account_id", "account_not_allowed")
        free = FREE_NEURONS_PER_DAY if account.plan is Plan.FREE else None
        return Visitor(account.account_id, caller.key_id, account.requests_per_minute, account.max_concurrent, free)

    @asynccontextmanager
    async def admitted(self, visitor: Visitor, model: str) -> AsyncIterator[None]:
        """Held while the request runs. Raises HttpError 429 that says which limit, and when to come again."""
        limit = self._max_concurrent if visitor.max_concurrent is None else visitor.max_concurrent
        if self._active[visitor.account_id] >= limit:
            what = f"{limit} requests of this account are under way, which is all it may have at once"
            raise _refused(what, "concurrency_limited", 1)
        self._active[visitor.account_id] += 1
        try:
            await self._check_allowance(visitor)
            await self._check_rate(visitor, model)
            yield
        finally:
            self._active[visitor.account_id] -= 1
            if not self._active[visitor.account_id]:
                del self._active[visitor.account_id]

    async def _check_allowance(self, visitor: Visitor) -> None:
        if visitor.free_neurons_per_day is None:
            return
        now = self._clock()
        if await self._ledger.spent(visitor.account_id, utc_day(now)) >= visitor.free_neurons_per_day * MICRO:
            what = f"the {visitor.free_neurons_per_day} free neurons of this day (UTC) are used up"
            raise _refused(what, "account_limited", seconds_to_midnight(now))

    async def _check_rate(self, visitor: Visitor, model: str) -> None:
        own = self._model_limits.get(model)
        shared = self._requests_per_minute if visitor.requests_per_minute is None else visitor.requests_per_minute
        limit, scope = (shared, SHARED_SCOPE) if own is None else (own, model)
        counted, next_minute_s = await self._windows.count(visitor.account_id, scope)
        if counted > limit:
            what = f"{limit} requests per minute are used up ({scope})"
            raise _refused(what, "rate_limited", next_minute_s)


def token_in(headers: Headers) -> str:
    """The API token, as OpenAI's and Cloudflare's clients send it or as Anthropic's do; "" = none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip()


def _refused(what: str, code: str, retry_after_s: float) -> HttpError:
    return HttpError(429, what, code=code, headers={"retry-after": str(max(1, math.ceil(retry_after_s)))})
