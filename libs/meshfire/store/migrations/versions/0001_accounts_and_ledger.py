"""Accounts, keys, request windows and the ledger."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_ROW_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "accounts",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("plan", sa.String(16), nullable=False),
        sa.Column("requests_per_minute", sa.Integer),
        sa.Column("max_concurrent", sa.Integer),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_accounts"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("digest", sa.LargeBinary(32), nullable=False),
        sa.Column("hint", sa.String(16), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("revoked_at", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name="fk_api_keys_account_id"),
        sa.UniqueConstraint("digest", name="uq_api_keys_digest"),
    )
    op.create_index("ix_api_keys_account_id", "api_keys", ["account_id"])
    op.create_table(
        "request_windows",
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("scope", sa.String(200), nullable=False),
        sa.Column("minute", sa.BigInteger, nullable=False),
        sa.Column("num_requests", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("account_id", "scope", "minute", name="pk_request_windows"),
    )
    op.create_index("ix_request_windows_minute", "request_windows", ["minute"])
    op.create_table(
        "ledger",
        sa.Column("id", _ROW_ID, autoincrement=True, nullable=False),
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("ended_at", sa.BigInteger, nullable=False),
        sa.Column("day", sa.String(10), nullable=False),
        sa.Column("outcome", sa.String(32), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
        sa.Column("reasoning_tokens", sa.BigInteger, nullable=False),
        sa.Column("micro_neurons", sa.BigInteger, nullable=False),
        sa.Column("trace_id", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_ledger"),
        sa.UniqueConstraint("request_id", name="uq_ledger_request_id"),
    )
    op.create_index("ix_ledger_account_id_day", "ledger", ["account_id", "day"])
    op.create_index("ix_ledger_day", "ledger", ["day"])
    op.create_table(
        "ledger_days",
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("day", sa.String(10), nullable=False),
        sa.Column("micro_neurons", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("account_id", "day", name="pk_ledger_days"),
    )
