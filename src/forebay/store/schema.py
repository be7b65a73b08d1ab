"""The tables as the code uses them. `migrations` creates them; a test compares the two.

Documents are JSON as text, in the exact bytes that were signed or digested. Times are seconds since the epoch.
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
"""All events, in the order in which they were appended; none is ever changed or removed.

`cluster`: the one it happened in; empty for what all clusters of a store share, such as the registry.
"""

HEAD = Table(
    "head",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("digest", String(64), nullable=False),
)
"""One row: number and digest of the last event. Appending locks it, so that numbers have no gaps."""

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
"""Content-addressed artifacts. `envelope`: how the content is encrypted, empty if it is not."""

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
"""Deployable revisions: an artifact, the engine that runs it, its settings, and metadata."""

APPROVALS = Table(
    "approvals",
    METADATA,
    Column("model", String(200), primary_key=True),
    Column("revision", String(32), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("document", Text, nullable=False),
    Column("signature", Text, nullable=False),
)
"""The approval steps, each signed by the registry together with the previous one."""

ALIASES = Table(
    "aliases",
    METADATA,
    Column("model", String(200), primary_key=True),
    Column("alias", String(64), primary_key=True),
    Column("revision", String(32), nullable=False),
    Column("changed_at", Float, nullable=False),
    Column("changed_by", String(200), nullable=False),
)
"""Names such as `champion` that refer to a revision."""

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
"""The revision that a model serves instead of the one its cluster file declares. `declared`: what the file declared
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
"""Rollouts, active and ended. `number` counts those of a model; `version` increases with every change, for optimistic
locking."""

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
"""The leader of a cluster: `holder` until `renewed_at + lease_s` by the clock of the database. `epoch` increases with
every new leader and is never reused; an empty holder has resigned."""

CONTROLLERS = Table(
    "controllers",
    METADATA,
    Column("cluster", String(64), primary_key=True),
    Column("holder", String(200), primary_key=True),
    Column("url", Text, nullable=False),
    Column("seen_at", Float, nullable=False),
)
"""The waiting controllers of a cluster: each reports regularly that it is alive. Times are those of the database."""

SCALES = Table(
    "scales",
    METADATA,
    Column("cluster", String(64), primary_key=True),
    Column("model", String(200), primary_key=True),
    Column("document", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("changed_at", Float, nullable=False),
)
"""The scaling state of a model, and what operators have set for it; `version` increases with every change."""

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
"""The state of a node of a cluster, and what operators have requested; `version` increases with every change."""
