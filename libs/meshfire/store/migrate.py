"""Brings a database to the schema of this version, one migration after the other, in the caller's transaction."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text

_FOLDER = Path(__file__).parent / "migrations"
#: any number that no one else uses: processes that start together migrate one after the other
_LOCK = 0x6D657368


def upgrade(connection: Connection) -> None:
    """Run what is missing. SQLite's write transaction already keeps others out."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    command.upgrade(_config(connection), "head")


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_FOLDER))
    config.attributes["connection"] = connection
    return config
