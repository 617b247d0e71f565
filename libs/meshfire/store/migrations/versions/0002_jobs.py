"""Jobs, their items and events, and files."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_ROW_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("label", sa.LargeBinary, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("num_items", sa.Integer, nullable=False),
        sa.Column("num_succeeded", sa.Integer, nullable=False),
        sa.Column("num_failed", sa.Integer, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("started_at", sa.BigInteger),
        sa.Column("ended_at", sa.BigInteger),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
        sa.Column("delete_at", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
    )
    op.create_index("ix_jobs_account_id_created_at", "jobs", ["account_id", "created_at"])
    op.create_index("ix_jobs_status", "jobs", ["status"])
    op.create_table(
        "job_items",
        sa.Column("job_id", sa.String(36), nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("reference", sa.String(512), nullable=False),
        sa.Column("request", sa.LargeBinary, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("beat", sa.Integer, nullable=False),
        sa.Column("num_attempts", sa.Integer, nullable=False),
        sa.Column("due_at", sa.BigInteger, nullable=False),
        sa.Column("result", sa.LargeBinary),
        sa.PrimaryKeyConstraint("job_id", "position", name="pk_job_items"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_items_job_id", ondelete="CASCADE"),
    )
    op.create_index("ix_job_items_status_due_at", "job_items", ["status", "due_at"])
    op.create_table(
        "job_events",
        sa.Column("id", _ROW_ID, autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(36), nullable=False),
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("message", sa.String(1024), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("num_attempts", sa.Integer, nullable=False),
        sa.Column("due_at", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name="pk_job_events"),
    )
    op.create_index("ix_job_events_due_at", "job_events", ["due_at"])
    op.create_table(
        "files",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(512), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_files"),
    )
    op.create_index("ix_files_account_id_created_at", "files", ["account_id", "created_at"])
    op.create_index("ix_files_expires_at", "files", ["expires_at"])
