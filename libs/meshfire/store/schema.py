"""The tables, as SQLAlchemy sees them. `migrations/` makes them; a test holds the two against each other.

Times are milliseconds since 1970 (UTC). Costs are whole micro-neurons. Days are UTC dates, `2026-12-01`.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
)

#: SQLite numbers rows by itself only for a column of exactly INTEGER
_RowId = BigInteger().with_variant(Integer, "sqlite")

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

#: Who is billed. A limit of NULL is the gateway's default.
accounts = Table(
    "accounts",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("name", String(200), nullable=False),
    Column("plan", String(16), nullable=False),
    Column("requests_per_minute", Integer),
    Column("max_concurrent", Integer),
    Column("created_at", BigInteger, nullable=False),
)

#: API tokens; only a digest of the token is kept.
api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("account_id", String(32), ForeignKey("accounts.id"), nullable=False, index=True),
    Column("name", String(200), nullable=False),
    Column("digest", LargeBinary(32), nullable=False, unique=True),
    Column("hint", String(16), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("revoked_at", BigInteger),
)

#: Requests of an account and model in one minute.
request_windows = Table(
    "request_windows",
    metadata,
    Column("account_id", String(32), primary_key=True),
    Column("scope", String(200), primary_key=True),
    Column("minute", BigInteger, primary_key=True),
    Column("num_requests", Integer, nullable=False),
    Index("ix_request_windows_minute", "minute"),
)

#: One row per answered request; `request_id` makes a second recording of the same one a no-op.
ledger = Table(
    "ledger",
    metadata,
    Column("id", _RowId, primary_key=True, autoincrement=True),
    Column("request_id", String(64), nullable=False, unique=True),
    Column("account_id", String(32), nullable=False),
    Column("key_id", String(32), nullable=False),
    Column("model", String(200), nullable=False),
    Column("ended_at", BigInteger, nullable=False),
    Column("day", String(10), nullable=False),
    Column("outcome", String(32), nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("reasoning_tokens", BigInteger, nullable=False),
    Column("micro_neurons", BigInteger, nullable=False),
    Column("trace_id", String(32), nullable=False),
    Index("ix_ledger_account_id_day", "account_id", "day"),
    Index("ix_ledger_day", "day"),
)

#: Sums of the ledger, written in its transactions: what a daily allowance is held against.
ledger_days = Table(
    "ledger_days",
    metadata,
    Column("account_id", String(32), primary_key=True),
    Column("day", String(10), primary_key=True),
    Column("micro_neurons", BigInteger, nullable=False),
)

#: Batches of requests that run when there is room. `status`: queued, running, completed, failed, cancelled, expired.
jobs = Table(
    "jobs",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("account_id", String(32), nullable=False),
    Column("key_id", String(32), nullable=False),
    Column("model", String(256), nullable=False),
    #: what the submitter wants to find again; opaque here
    Column("label", LargeBinary, nullable=False),
    Column("status", String(16), nullable=False),
    Column("num_items", Integer, nullable=False),
    Column("num_succeeded", Integer, nullable=False),
    Column("num_failed", Integer, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("started_at", BigInteger),
    Column("ended_at", BigInteger),
    Column("expires_at", BigInteger, nullable=False),
    #: results go then
    Column("delete_at", BigInteger),
    Index("ix_jobs_account_id_created_at", "account_id", "created_at"),
    Index("ix_jobs_status", "status"),
)

#: `status`: queued, running, succeeded, failed, cancelled. A claim raises `epoch`; only its holder may commit.
job_items = Table(
    "job_items",
    metadata,
    Column("job_id", String(36), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("reference", String(512), nullable=False),
    Column("request", LargeBinary, nullable=False),
    Column("status", String(16), nullable=False),
    Column("epoch", Integer, nullable=False),
    #: grows while its holder lives
    Column("beat", Integer, nullable=False),
    Column("num_attempts", Integer, nullable=False),
    #: not claimed before
    Column("due_at", BigInteger, nullable=False),
    Column("result", LargeBinary),
    Index("ix_job_items_status_due_at", "status", "due_at"),
)

#: What submitters and watchers are told, in order; a webhook's deliveries are noted here.
job_events = Table(
    "job_events",
    metadata,
    Column("id", _RowId, primary_key=True, autoincrement=True),
    Column("job_id", String(36), nullable=False),
    Column("account_id", String(32), nullable=False),
    Column("model", String(256), nullable=False),
    Column("kind", String(32), nullable=False),
    Column("message", String(1024), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("num_attempts", Integer, nullable=False),
    #: next delivery; NULL = delivered, given up, or there is no webhook
    Column("due_at", BigInteger),
    Index("ix_job_events_due_at", "due_at"),
)

#: Files of the batch dialects: inputs as they were uploaded.
files = Table(
    "files",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("account_id", String(32), nullable=False),
    Column("name", String(512), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("content", LargeBinary, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Index("ix_files_account_id_created_at", "account_id", "created_at"),
    Index("ix_files_expires_at", "expires_at"),
)
