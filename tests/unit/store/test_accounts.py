"""Keys: made, used, listed, revoked; the database never holds a token."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from meshfire.errors import BadInput, NotFound
from meshfire.store.accounts import Accounts, Plan
from meshfire.store.database import Database
from meshfire.store.schema import api_keys


async def test_a_token_opens_its_account_until_it_is_revoked(database: Database) -> None:
    accounts = Accounts(database)
    one = await accounts.create_account("one", Plan.PAID, requests_per_minute=7, max_concurrent=2)
    other = await accounts.create_account("other")
    key, token = await accounts.create_key(one.account_id, "laptop")
    spare, spare_token = await accounts.create_key(one.account_id, "spare")
    caller = await accounts.caller(token)
    assert caller is not None
    assert (caller.account, caller.key_id) == (one, key.key_id)
    assert await accounts.caller(token[:-1]) is None
    assert await accounts.caller("") is None
    await accounts.revoke_key(key.key_id)
    await accounts.revoke_key(key.key_id)
    assert await accounts.caller(token) is None
    assert await accounts.caller(spare_token) is not None
    listed = await accounts.list_keys(one.account_id)
    assert {(entry.key_id, entry.revoked_at_ms is None) for entry in listed} == {
        (key.key_id, False),
        (spare.key_id, True),
    }
    assert await accounts.list_keys(other.account_id) == []
    assert await accounts.list_accounts() == [one, other]


async def test_only_a_digest_is_kept(database: Database) -> None:
    accounts = Accounts(database)
    account = await accounts.create_account("one")
    key, token = await accounts.create_key(account.account_id, "laptop")
    async with database.read() as connection:
        row = (await connection.execute(select(api_keys))).one()
    assert token not in str(row)
    assert token.startswith(key.hint)
    assert len(token) > 4 * len(key.hint)


async def test_what_is_not_there(database: Database) -> None:
    accounts = Accounts(database)
    with pytest.raises(NotFound):
        await accounts.create_key("f" * 32, "laptop")
    with pytest.raises(NotFound):
        await accounts.revoke_key("f" * 32)
    with pytest.raises(BadInput) as caught:
        await accounts.create_account("")
    assert caught.value.field == "name"
