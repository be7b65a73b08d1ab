"""Desired state of deployments: targets and rollouts of a cluster, each change with its event in one transaction."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import msgspec
from sqlalchemy import Connection, RowMapping, delete, func, insert, select, update

from forebay.core.deploy.counting import Counted
from forebay.core.deploy.rollout import ENDED, Rollout
from forebay.core.deploy.slots import Held
from forebay.core.rollout.values import Metric, Rate, Rules, Score, Time
from forebay.store import events
from forebay.store.database import Conflict, Store, StoreError
from forebay.store.lazy import LazyStore
from forebay.store.schema import ROLLOUTS, TARGETS
from forebay.wire.documents import UNREADABLE

T = TypeVar("T")
PAST_MAX: Final = 1000
"""The most ended rollouts returned at once."""


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The revision that a model serves, whatever its file declares; `declared`: what that was at the time."""

    model: str
    revision: str
    declared: str
    indices: tuple[int, ...]
    changed_at: float
    changed_by: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A stored rollout. Times are seconds since the epoch."""

    rollout: Rollout
    rules: Rules
    """The rules by which it is judged, from beginning to end."""
    counted: Counted
    held: Held
    created_at: float
    created_by: str
    version: int = 1

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.rollout.phase in ENDED


@dataclass(frozen=True, slots=True)
class Known:
    """The state that control loads: targets, active rollouts, and the last ended one of each model."""

    targets: tuple[Target, ...] = ()
    rollouts: tuple[Row, ...] = ()


class Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The document of an event: what was written. None: nothing of that kind."""

    rollout: Rollout | None = None
    held: Held | None = None
    target: Target | None = None


@dataclass(frozen=True, slots=True)
class RolloutEvent:
    """The event of a change: who did what when, and why."""

    kind: str
    at: float
    actor: str
    why: str = ""


class Rollouts:
    """Targets and rollouts of one cluster in a store, which is opened on first use.

    Every method raises `StoreError`. Thread-safe.
    """

    def __init__(
        self, open_store: Callable[[], Store], cluster: str, exists: Callable[[], bool] = lambda: True
    ) -> None:
        self._cluster = cluster
        self._lazy_store = LazyStore(open_store, exists)

    def close(self) -> None:
        """Close the store."""
        self._lazy_store.close()

    def known(self) -> Known:
        """The stored state; empty if there is no store yet."""
        if not self._lazy_store.exists:
            return Known()
        own = ROLLOUTS.c.cluster == self._cluster
        latest: list[Row] = []
        with self._lazy_store.store().read() as connection:
            targets = connection.execute(
                select(TARGETS).where(TARGETS.c.cluster == self._cluster).order_by(TARGETS.c.model)
            ).mappings()
            found = tuple(_target(row) for row in targets)
            models = select(ROLLOUTS.c.model).where(own).distinct().order_by(ROLLOUTS.c.model)
            for model in connection.execute(models).scalars().all():
                latest += self._latest(connection, model, 1)
        return Known(found, tuple(latest))

    def past(self, model: str | None = None, last: int = PAST_MAX) -> tuple[Row, ...]:
        """The last rollouts, of a model or of all: active ones, then ended ones, newest first."""
        if not self._lazy_store.exists:
            return ()
        with self._lazy_store.store().read() as connection:
            return self._latest(connection, model, min(last, PAST_MAX))

    def _latest(self, connection: Connection, model: str | None, several: int) -> tuple[Row, ...]:
        asked = select(ROLLOUTS).where(ROLLOUTS.c.cluster == self._cluster)
        if model is not None:
            asked = asked.where(ROLLOUTS.c.model == model)
        newest = ROLLOUTS.c.created_at if model is None else ROLLOUTS.c.number
        asked = asked.order_by(ROLLOUTS.c.ended, newest.desc(), ROLLOUTS.c.model).limit(several)
        return tuple(_row(row) for row in connection.execute(asked).mappings())

    def begin(self, row: Row, event: RolloutEvent) -> Row:
        """Store a new rollout and give it an id. Raises `Conflict` if the model has an active one."""
        model = row.rollout.model
        own = (ROLLOUTS.c.cluster == self._cluster) & (ROLLOUTS.c.model == model)
        with self._lazy_store.store().write() as connection:
            under_way = select(ROLLOUTS.c.id).where(own & ROLLOUTS.c.ended.is_(False))
            other = connection.execute(under_way).scalars().first()
            if other is not None:
                raise Conflict(f"rollout {other} of {model} is under way")
            number = connection.execute(select(func.count()).select_from(ROLLOUTS).where(own)).scalar_one() + 1
            row = replace(row, rollout=replace(row.rollout, id=f"{model}:{number}"), version=1)
            connection.execute(
                insert(ROLLOUTS).values(
                    cluster=self._cluster,
                    id=row.rollout.id,
                    number=number,
                    model=model,
                    rules=_text(rules_document(row.rules)),
                    created_at=row.created_at,
                    created_by=row.created_by,
                    **_columns(row),
                )
            )
            self._note(connection, event, row)
        return row

    def change(self, row: Row, events: Sequence[RolloutEvent], target: Target | None = None) -> Row:
        """Store the new state of a rollout, and the resulting target. Raises `Conflict` if it was changed
        concurrently."""
        with self._lazy_store.store().write() as connection:
            self._replace(connection, row)
            if target is not None:
                self._put(connection, target)
            for event in events:
                self._note(connection, event, row, target)
        return replace(row, version=row.version + 1)

    def _replace(self, connection: Connection, row: Row) -> None:
        same = (
            (ROLLOUTS.c.cluster == self._cluster)
            & (ROLLOUTS.c.id == row.rollout.id)
            & (ROLLOUTS.c.version == row.version)
        )
        values = _columns(replace(row, version=row.version + 1))
        if connection.execute(update(ROLLOUTS).where(same).values(values)).rowcount != 1:
            raise Conflict(f"rollout {row.rollout.id} was changed concurrently")

    def point(self, target: Target, event: RolloutEvent) -> None:
        """Set the revision that a model serves, whatever it served before."""
        with self._lazy_store.store().write() as connection:
            self._put(connection, target)
            document = Written(target=target)
            events.append(
                connection,
                at=event.at,
                actor=event.actor,
                kind=event.kind,
                subject=f"model/{target.model}",
                why=event.why,
                document=document,
                cluster=self._cluster,
            )

    def _put(self, connection: Connection, target: Target) -> None:
        own = (TARGETS.c.cluster == self._cluster) & (TARGETS.c.model == target.model)
        connection.execute(delete(TARGETS).where(own))
        values = {**msgspec.structs.asdict(target), "indices": _text(target.indices)}
        connection.execute(insert(TARGETS).values(cluster=self._cluster, **values))

    def _note(self, connection: Connection, what: RolloutEvent, row: Row, target: Target | None = None) -> None:
        events.append(
            connection,
            at=what.at,
            actor=what.actor,
            kind=what.kind,
            subject=f"model/{row.rollout.model}/{row.rollout.canary}",
            why=what.why,
            document=Written(row.rollout, row.held, target),
            cluster=self._cluster,
        )


def replay(log: Iterable[events.Event]) -> tuple[dict[str, Target], dict[str, tuple[Rollout, Held]]]:
    """Rebuild the targets by model and the rollouts by id from the events of one cluster."""
    targets: dict[str, Target] = {}
    rollouts: dict[str, tuple[Rollout, Held]] = {}
    for event in log:
        if not event.kind.startswith(("rollout.", "target.")):
            continue
        written = _read(event.document, Written, f"event {event.number}")
        if written.rollout is not None and written.held is not None:
            rollouts[written.rollout.id] = (written.rollout, written.held)
        if written.target is not None:
            targets[written.target.model] = written.target
    return targets, rollouts


class RulesDocument(msgspec.Struct, frozen=True):
    """Rules as JSON, where the metrics are listed by kind."""

    order: tuple[str, ...]
    rates: tuple[Rate, ...]
    times: tuple[Time, ...]
    scores: tuple[Score, ...]
    rollback_alpha: float
    promote_alpha: float


def rules_document(rules: Rules) -> RulesDocument:
    """The stored form of rules."""
    return RulesDocument(
        tuple(metric.name for metric in rules.metrics),
        tuple(metric for metric in rules.metrics if isinstance(metric, Rate)),
        tuple(metric for metric in rules.metrics if isinstance(metric, Time)),
        tuple(metric for metric in rules.metrics if isinstance(metric, Score)),
        rules.rollback_alpha,
        rules.promote_alpha,
    )


def rules_from(flat: RulesDocument) -> Rules:
    """Restore rules. Raises KeyError for a document that names metrics it does not hold."""
    metrics: tuple[Metric, ...] = (*flat.rates, *flat.times, *flat.scores)
    named = {metric.name: metric for metric in metrics}
    return Rules(tuple(named[name] for name in flat.order), flat.rollback_alpha, flat.promote_alpha)


def _columns(row: Row) -> dict[str, Any]:
    """The columns of a row that change."""
    return {
        "document": _text(row.rollout),
        "evidence": _text(row.counted),
        "indices": _text(row.held),
        "version": row.version,
        "ended": row.ended,
    }


def _row(found: RowMapping) -> Row:
    what = f"rollout {found['id']}"
    flat = _read(found["rules"], RulesDocument, f"{what}: its rules")
    try:
        rules = rules_from(flat)
    except KeyError as error:
        raise StoreError(f"{what}: its rules cannot be read: no metric {error}") from error
    return Row(
        rollout=_read(found["document"], Rollout, what),
        rules=rules,
        counted=_read(found["evidence"], Counted, f"{what}: its evidence"),
        held=_read(found["indices"], Held, f"{what}: its slots"),
        created_at=found["created_at"],
        created_by=found["created_by"],
        version=found["version"],
    )


def _target(found: RowMapping) -> Target:
    values: Mapping[str, Any] = {name: found[name] for name in Target.__struct_fields__}
    indices = _read(found["indices"], tuple[int, ...], f"target of {found['model']}: its slots")
    return Target(**{**values, "indices": indices})


def _text(document: object) -> str:
    return msgspec.json.encode(document).decode()


def _read(text: str, type: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(text, type=type)
    except UNREADABLE as error:
        raise StoreError(f"{what} cannot be read: {error}") from error
