"""Accounts and their API tokens.

Owns what a token looks like and that only its digest is kept: a token is 240 random bits, so a plain SHA-256 is as good
as a slow hash, and a lookup costs one index read. A token is shown once, when it is made.
"""

from __future__ import annotations

import enum
import hashlib
import secrets
import string
import uuid
from dataclasses import dataclass

from sqlalchemy import Row, insert, select, update

from meshfire.errors import BadInput, NotFound
from meshfire.store.clock import Clock, millis, wall_clock
from meshfire.store.database import Database
from meshfire.store.schema import accounts, api_keys

_PREFIX = "mf_"
_TOKEN_CHARS = 40
_HINT_CHARS = 8
_ALPHABET = string.ascii_letters + string.digits
MAX_NAME_CHARS = 200


class Plan(enum.Enum):
    """What happens beyond the daily free neurons."""

    FREE = "free"  # refused until 00:00 UTC
    PAID = "paid"  # billed


@dataclass(frozen=True)
class Account:
    """Who is billed. A limit of None is the default of the gateway that holds it."""

    account_id: str
    name: str
    plan: Plan
    requests_per_minute: int | None = None
    max_concurrent: int | None = None


@dataclass(frozen=True)
class ApiKey:
    """A token without the token; `hint` is its beginning."""

    key_id: str
    account_id: str
    name: str
    hint: str
    created_at_ms: int
    revoked_at_ms: int | None


@dataclass(frozen=True)
class Caller:
    """Whom a token belongs to."""

    account: Account
    key_id: str


class Accounts:
    """Reads and writes both tables."""

    def __init__(self, database: Database, clock: Clock = wall_clock) -> None:
        self._database = database
        self._clock = clock

    async def create_account(
        self,
        name: str,
        plan: Plan = Plan.FREE,
        *,
        requests_per_minute: int | None = None,
        max_concurrent: int | None = None,
    ) -> Account:
        """A new account with an id of 32 hex digits. Raises BadInput for the name."""
        made = Account(uuid.uuid4().hex, _name(name), plan, requests_per_minute, max_concurrent)
        values = {
            "id": made.account_id,
            "name": made.name,
            "plan": plan.value,
            "requests_per_minute": requests_per_minute,
            "max_concurrent": max_concurrent,
            "created_at": millis(self._clock()),
        }
        async with self._database.write() as connection:
            await connection.execute(insert(accounts).values(values))
        return made

    async def account(self, account_id: str) -> Account:
        """Raises NotFound."""
        async with self._database.read() as connection:
            row = (await connection.execute(select(accounts).where(accounts.c.id == account_id))).first()
        if row is None:
            raise NotFound(f"there is no account {account_id!r}", field="account_id")
        return _account(row)

    async def list_accounts(self) -> list[Account]:
        """All, by name."""
        async with self._database.read() as connection:
            rows = (await connection.execute(select(accounts).order_by(accounts.c.name, accounts.c.id))).all()
        return [_account(row) for row in rows]

    async def create_key(self, account_id: str, name: str) -> tuple[ApiKey, str]:
        """A new key and its token, which nobody can read again. Raises NotFound, BadInput."""
        account = await self.account(account_id)
        token = _PREFIX + "".join(secrets.choice(_ALPHABET) for _ in range(_TOKEN_CHARS))
        made = ApiKey(
            uuid.uuid4().hex, account.account_id, _name(name), token[:_HINT_CHARS], millis(self._clock()), None
        )
        values = {
            "id": made.key_id,
            "account_id": made.account_id,
            "name": made.name,
            "digest": digest(token),
            "hint": made.hint,
            "created_at": made.created_at_ms,
        }
        async with self._database.write() as connection:
            await connection.execute(insert(api_keys).values(values))
        return made, token

    async def list_keys(self, account_id: str | None = None) -> list[ApiKey]:
        """Of one account or of all, revoked ones too, oldest first."""
        query = select(api_keys).order_by(api_keys.c.created_at, api_keys.c.id)
        if account_id is not None:
            query = query.where(api_keys.c.account_id == account_id)
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
        return [_key(row) for row in rows]

    async def revoke_key(self, key_id: str) -> None:
        """From now on its token opens nothing. Revoking twice is no error. Raises NotFound."""
        change = update(api_keys).where(api_keys.c.id == key_id)
        async with self._database.write() as connection:
            found = await connection.execute(select(api_keys.c.id).where(api_keys.c.id == key_id))
            if found.first() is None:
                raise NotFound(f"there is no key {key_id!r}", field="key_id")
            await connection.execute(
                change.where(api_keys.c.revoked_at.is_(None)).values(revoked_at=millis(self._clock()))
            )

    async def caller(self, token: str) -> Caller | None:
        """Whose token it is; None for an unknown or a revoked one."""
        query = (
            select(accounts, api_keys.c.id.label("key_id"))
            .join(api_keys, api_keys.c.account_id == accounts.c.id)
            .where(api_keys.c.digest == digest(token), api_keys.c.revoked_at.is_(None))
        )
        async with self._database.read() as connection:
            row = (await connection.execute(query)).first()
        return None if row is None else Caller(_account(row), row.key_id)


def digest(token: str) -> bytes:
    """What is kept of a token."""
    return hashlib.sha256(token.encode()).digest()


def _name(name: str) -> str:
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise BadInput(f"name has {len(name)} characters, expected 1 to {MAX_NAME_CHARS}", field="name")
    return name


def _account(row: Row[tuple[object, ...]]) -> Account:
    return Account(row.id, row.name, Plan(row.plan), row.requests_per_minute, row.max_concurrent)


def _key(row: Row[tuple[object, ...]]) -> ApiKey:
    return ApiKey(row.id, row.account_id, row.name, row.hint, row.created_at, row.revoked_at)
