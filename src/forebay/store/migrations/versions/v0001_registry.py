"""Events, and the registry of models."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the first tables."""
    _events()
    _models()


def _events() -> None:
    number = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.create_table(
        "events",
        sa.Column("number", number, autoincrement=False, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("actor", sa.String(200), nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("subject", sa.String(300), nullable=False),
        sa.Column("why", sa.Text, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("previous", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_events"),
    )
    op.create_index("ix_events_subject", "events", ["subject", "number"])
    head = op.create_table(
        "head",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_head"),
    )
    op.bulk_insert(head, [{"id": 1, "number": 0, "digest": "0" * 64}])


def _models() -> None:
    op.create_table(
        "artifacts",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("manifest", sa.Text, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("envelope", sa.Text, nullable=False),
        sa.Column("signatures", sa.Text, nullable=False),
        sa.Column("added_at", sa.Float, nullable=False),
        sa.Column("added_by", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_artifacts"),
    )
    op.create_table(
        "revisions",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("artifact", sa.String(64), nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("created_by", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("id", "model", name="pk_revisions"),
        sa.ForeignKeyConstraint(["artifact"], ["artifacts.digest"], name="fk_revisions_artifact"),
    )
    op.create_index("ix_revisions_model", "revisions", ["model", "created_at"])
    op.create_table(
        "approvals",
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("revision", sa.String(32), nullable=False),
        sa.Column("number", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("signature", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("model", "revision", "number", name="pk_approvals"),
    )
    op.create_table(
        "aliases",
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("alias", sa.String(64), nullable=False),
        sa.Column("revision", sa.String(32), nullable=False),
        sa.Column("changed_at", sa.Float, nullable=False),
        sa.Column("changed_by", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("model", "alias", name="pk_aliases"),
    )
