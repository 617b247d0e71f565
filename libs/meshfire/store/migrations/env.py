"""Alembic's entry: migrates on the connection, and in the transaction, that `meshfire.store.migrate` brings."""

from __future__ import annotations

from alembic import context

from meshfire.store.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
