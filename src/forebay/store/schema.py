"""The tables, as the code uses them. `migrations` makes them; a test compares the two.

Documents are JSON as text, in the bytes in which they were signed or digested. Times are seconds since the epoch.
"""

from sqlalchemy import BigInteger, Boolean, Column, Float, ForeignKey, Index, Integer, MetaData, String, Table, Text

METADATA = MetaData(
    naming_convention={"pk": "pk_%(table_name)s", "fk": "fk_%(table_name)s_%(column_0_name)s"},
)

EVENTS = Table(
    "events",
    METADATA,
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("at", Float, nullable=False),
    Column("actor", String(200), nullable=False),
    Column("kind", String(64), nullable=False),
    Column("subject", String(300), nullable=False),
    Column("why", Text, nullable=False),
    Column("document", Text, nullable=False),
    Column("previous", String(64), nullable=False),
    Column("digest", String(64), nullable=False),
    Column("cluster", String(64), nullable=False),
    Index("ix_events_subject", "subject", "number"),
)
"""What has happened, in the order in which it was written down; nothing is ever changed or taken out.

`cluster`: the one that it happened in; empty for what all that use a store share, as the registry.
"""

HEAD = Table(
    "head",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("digest", String(64), nullable=False),
)
"""One row: number and digest of the last event. Who appends holds it locked, so that numbers have no gaps."""

ARTIFACTS = Table(
    "artifacts",
    METADATA,
    Column("digest", String(64), primary_key=True),
    Column("source", Text, nullable=False),
    Column("manifest", Text, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("envelope", Text, nullable=False),
    Column("signatures", Text, nullable=False),
    Column("added_at", Float, nullable=False),
    Column("added_by", String(200), nullable=False),
)
"""Content, named by its digest. `envelope`: how it is encrypted, empty if it is not."""

REVISIONS = Table(
    "revisions",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("model", String(200), primary_key=True),
    Column("artifact", String(64), ForeignKey("artifacts.digest"), nullable=False),
    Column("document", Text, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("created_by", String(200), nullable=False),
    Index("ix_revisions_model", "model", "created_at"),
)
"""What can be deployed: an artifact, the engine that runs it, its settings, and what is known of it."""

APPROVALS = Table(
    "approvals",
    METADATA,
    Column("model", String(200), primary_key=True),
    Column("revision", String(32), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("document", Text, nullable=False),
    Column("signature", Text, nullable=False),
)
"""The steps of approval, each signed by the registry together with the one before it."""

ALIASES = Table(
    "aliases",
    METADATA,
    Column("model", String(200), primary_key=True),
    Column("alias", String(64), primary_key=True),
    Column("revision", String(32), nullable=False),
    Column("changed_at", Float, nullable=False),
    Column("changed_by", String(200), nullable=False),
)
"""Names such as `champion` that lead to a revision."""

TARGETS = Table(
    "targets",
    METADATA,
    Column("cluster", String(64), primary_key=True),
    Column("model", String(200), primary_key=True),
    Column("revision", String(32), nullable=False),
    Column("declared", String(32), nullable=False),
    Column("indices", Text, nullable=False),
    Column("changed_at", Float, nullable=False),
    Column("changed_by", String(200), nullable=False),
    Column("why", Text, nullable=False),
)
"""The revision that a model serves in place of what its cluster file declares. `declared`: what the file declared
when this was written; `indices`: the slots that the revision holds."""

ROLLOUTS = Table(
    "rollouts",
    METADATA,
    Column("cluster", String(64), primary_key=True),
    Column("id", String(220), primary_key=True),
    Column("model", String(200), nullable=False),
    Column("number", Integer, nullable=False),
    Column("document", Text, nullable=False),
    Column("rules", Text, nullable=False),
    Column("evidence", Text, nullable=False),
    Column("indices", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("ended", Boolean, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("created_by", String(200), nullable=False),
    Index("ix_rollouts_model", "cluster", "model", "number", unique=True),
)
"""Rollouts, under way and ended. `number` counts those of a model; `version` grows with every change: who changes a
row says which one was read."""

LEADERS = Table(
    "leaders",
    METADATA,
    Column("cluster", String(64), primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("holder", String(200), nullable=False),
    Column("url", Text, nullable=False),
    Column("renewed_at", Float, nullable=False),
    Column("lease_s", Float, nullable=False),
)
"""Which control leads a cluster: `holder` until `renewed_at + lease_s` by the clock of the database. `epoch` grows
with every other leader, and is never given twice; a holder that is empty has given it back."""

CONTROLLERS = Table(
    "controllers",
    METADATA,
    Column("cluster", String(64), primary_key=True),
    Column("holder", String(200), primary_key=True),
    Column("url", Text, nullable=False),
    Column("seen_at", Float, nullable=False),
)
"""The controls of a cluster that wait for their turn: each says now and then that it is there. Times are those of the
database."""

SCALES = Table(
    "scales",
    METADATA,
    Column("cluster", String(64), primary_key=True),
    Column("model", String(200), primary_key=True),
    Column("document", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("changed_at", Float, nullable=False),
)
"""What the scaling of a model remembers, and what people have set of it; `version` grows with every change."""

NODES = Table(
    "nodes",
    METADATA,
    Column("cluster", String(64), primary_key=True),
    Column("name", String(200), primary_key=True),
    Column("document", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("changed_at", Float, nullable=False),
    Column("changed_by", String(200), nullable=False),
    Column("why", Text, nullable=False),
)
"""What is known of a node of a cluster, and what people have asked of it; `version` grows with every change."""
