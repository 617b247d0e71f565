"""The ledger: one line per answered request, and what the lines of a day add up to.

Owns that a request is billed once, however often it is recorded, and that the sums of `ledger_days` are those of the
lines: both change in one transaction. What a token costs is `meshfire.metering`'s.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from meshfire.metering.neurons import Tokens
from meshfire.store.clock import millis, utc_day
from meshfire.store.database import Database
from meshfire.store.schema import ledger, ledger_days


@dataclass(frozen=True)
class Line:
    """What one request took. `ended_at` in seconds since 1970; `outcome` is a finish reason or an error's reason."""

    request_id: str
    account_id: str
    key_id: str
    model: str
    ended_at: float
    outcome: str
    tokens: Tokens
    reasoning_tokens: int
    micro_neurons: int
    trace_id: str = ""


class GroupBy(enum.Enum):
    """What `sums` adds up by."""

    DAY = "day"
    MODEL = "model"
    KEY = "key"
    ACCOUNT = "account"


@dataclass(frozen=True)
class Sum:
    """Lines of one group; `group` has a value per column asked for."""

    group: tuple[str, ...]
    num_requests: int
    tokens: Tokens
    reasoning_tokens: int
    micro_neurons: int


_COLUMNS: dict[GroupBy, ColumnElement[str]] = {
    GroupBy.DAY: ledger.c.day,
    GroupBy.MODEL: ledger.c.model,
    GroupBy.KEY: ledger.c.key_id,
    GroupBy.ACCOUNT: ledger.c.account_id,
}


class Ledger:
    """Reads and writes both tables."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def record(self, lines: Sequence[Line]) -> int:
        """Write what is new of `lines` in one transaction; how many were."""
        if not lines:
            return 0
        async with self._database.write() as connection:
            return await self.record_in(connection, lines)

    async def record_in(self, connection: AsyncConnection, lines: Sequence[Line]) -> int:
        """As `record`, inside the caller's transaction: a job's result and its cost are committed together."""
        dialect = sqlite if self._database.dialect == "sqlite" else postgresql
        new = dialect.insert(ledger).on_conflict_do_nothing(index_elements=["request_id"]).returning(ledger.c.id)
        day = dialect.insert(ledger_days)
        add = day.on_conflict_do_update(
            index_elements=["account_id", "day"],
            set_={"micro_neurons": ledger_days.c.micro_neurons + day.excluded.micro_neurons},
        )
        num_new = 0
        for line in lines:
            values = _values(line)
            if (await connection.execute(new, values)).first() is None:
                continue
            num_new += 1
            kept = {name: values[name] for name in ("account_id", "day", "micro_neurons")}
            await connection.execute(add, kept)
        return num_new

    async def spent(self, account_id: str, day: str) -> int:
        """Micro-neurons of an account on a UTC day."""
        query = select(ledger_days.c.micro_neurons).where(
            ledger_days.c.account_id == account_id, ledger_days.c.day == day
        )
        async with self._database.read() as connection:
            found: int | None = (await connection.execute(query)).scalar_one_or_none()
        return found or 0

    async def sums(
        self,
        by: Sequence[GroupBy],
        *,
        account_id: str | None = None,
        first_day: str | None = None,
        last_day: str | None = None,
    ) -> list[Sum]:
        """Added up by the columns of `by`, in their order; days inclusive."""
        columns = [_COLUMNS[one] for one in by]
        totals = (ledger.c.prompt_tokens, ledger.c.cached_tokens, ledger.c.output_tokens, ledger.c.reasoning_tokens)
        query = select(*columns, func.count(), *(func.sum(one) for one in totals), func.sum(ledger.c.micro_neurons))
        if account_id is not None:
            query = query.where(ledger.c.account_id == account_id)
        if first_day is not None:
            query = query.where(ledger.c.day >= first_day)
        if last_day is not None:
            query = query.where(ledger.c.day <= last_day)
        async with self._database.read() as connection:
            rows = (await connection.execute(query.group_by(*columns).order_by(*columns))).all()
        return [_sum(tuple(row), len(columns)) for row in rows if row[len(columns)]]


def _values(line: Line) -> dict[str, object]:
    return {
        "request_id": line.request_id,
        "account_id": line.account_id,
        "key_id": line.key_id,
        "model": line.model,
        "ended_at": millis(line.ended_at),
        "day": utc_day(line.ended_at),
        "outcome": line.outcome,
        "prompt_tokens": line.tokens.prompt,
        "cached_tokens": line.tokens.cached,
        "output_tokens": line.tokens.output,
        "reasoning_tokens": line.reasoning_tokens,
        "micro_neurons": line.micro_neurons,
        "trace_id": line.trace_id,
    }


def _sum(row: tuple[object, ...], num_columns: int) -> Sum:
    group, numbers = row[:num_columns], [int(str(one)) for one in row[num_columns:]]
    count, prompt, cached, output, reasoning, micro = numbers
    return Sum(tuple(str(one) for one in group), count, Tokens(prompt, cached, output), reasoning, micro)
