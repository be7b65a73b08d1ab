"""Who leads a cluster, what is known of the scaling of its models, and what is known of its nodes."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Create their tables."""
    op.create_table(
        "leaders",
        sa.Column("cluster", sa.String(64), nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("holder", sa.String(200), nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("renewed_at", sa.Float, nullable=False),
        sa.Column("lease_s", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("cluster", name="pk_leaders"),
    )
    op.create_table(
        "controllers",
        sa.Column("cluster", sa.String(64), nullable=False),
        sa.Column("holder", sa.String(200), nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("seen_at", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("cluster", "holder", name="pk_controllers"),
    )
    op.create_table(
        "scales",
        sa.Column("cluster", sa.String(64), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("changed_at", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("cluster", "model", name="pk_scales"),
    )
    op.create_table(
        "nodes",
        sa.Column("cluster", sa.String(64), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("changed_at", sa.Float, nullable=False),
        sa.Column("changed_by", sa.String(200), nullable=False),
        sa.Column("why", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("cluster", "name", name="pk_nodes"),
    )
