"""Alembic's environment: runs on the given connection, within its transaction."""

from alembic import context

from forebay.store.schema import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA)
context.run_migrations()
