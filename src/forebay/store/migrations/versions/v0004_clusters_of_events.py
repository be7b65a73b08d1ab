"""Events record their cluster, which is unknown for existing ones."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the column to the event log."""
    op.add_column("events", sa.Column("cluster", sa.String(64), nullable=False, server_default=""))
