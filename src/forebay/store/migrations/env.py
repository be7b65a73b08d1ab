"""What alembic runs: on the connection, and in the transaction, that it is given."""

from alembic import context

from forebay.store.schema import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA)
context.run_migrations()
