"""Targets and rollouts."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Create their tables."""
    op.create_table(
        "targets",
        sa.Column("cluster", sa.String(64), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("revision", sa.String(32), nullable=False),
        sa.Column("declared", sa.String(32), nullable=False),
        sa.Column("indices", sa.Text, nullable=False),
        sa.Column("changed_at", sa.Float, nullable=False),
        sa.Column("changed_by", sa.String(200), nullable=False),
        sa.Column("why", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("cluster", "model", name="pk_targets"),
    )
    op.create_table(
        "rollouts",
        sa.Column("cluster", sa.String(64), nullable=False),
        sa.Column("id", sa.String(220), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("rules", sa.Text, nullable=False),
        sa.Column("evidence", sa.Text, nullable=False),
        sa.Column("indices", sa.Text, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("ended", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("created_by", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "id", name="pk_rollouts"),
    )
    op.create_index("ix_rollouts_model", "rollouts", ["cluster", "model", "number"], unique=True)
