"""Invariants of rollouts, checked whenever control publishes a snapshot or stops a unit."""

from typing import Final, Protocol

from forebay.control.deploying import RolloutStanding
from forebay.core.deploy.course import replicas_for
from forebay.core.deploy.rollout import Phase, Rollout
from forebay.core.model import ModelRoutes
from forebay.core.routing import LIVE
from forebay.sim.full.clients import MODEL
from forebay.sim.full.event_log import EventLog
from forebay.sim.full.replica import Nature
from forebay.store.events import Event
from forebay.store.rollouts import Known, Rollouts, replay

SHARE_ERROR: Final = 1e-9


class Facts(Protocol):
    """What the invariants compare."""

    event_log: EventLog
    truth: Rollouts
    """The stored state, whatever control knows of it."""
    declared: str
    """The revision in the cluster file."""
    replicas: int
    """Desired number of replicas."""
    whole: bool
    """Replicas have no faults except those of their revisions."""
    surest: dict[str, float]
    """The largest stored share of each rollout, as a control without store access knows no better."""

    def events(self) -> list[Event]:
        """The event log."""

    def nature(self, revision: str) -> Nature:
        """The faults of a revision."""


def wanted(known: Known, declared: str, replicas: int) -> dict[str, str]:
    """Desired revisions by slot when no rollout is running."""
    revision, indices = declared, tuple(range(replicas))
    for target in known.targets:
        revision, indices = target.revision, target.indices
    return {f"{MODEL}-{index}": revision for index in indices}


def note_shares(facts: Facts) -> None:
    """Update after a possible write."""
    for row in facts.truth.known().rollouts:
        stored = 1.0 if row.rollout.phase is Phase.PROMOTED else row.rollout.share
        facts.surest[row.rollout.id] = max(facts.surest.get(row.rollout.id, 0.0), stored)


def check_published(models: tuple[ModelRoutes, ...], facts: Facts) -> None:
    """A snapshot was written."""
    known = facts.truth.known()
    rows = {row.rollout.id: row for row in known.rollouts}
    expect = facts.event_log.expect
    for routes in models:
        split, row = routes.split, rows.get(routes.split.rollout) if routes.split else None
        live = [each.revision for each in routes.replicas if each.state in LIVE]
        serves = wanted(known, facts.declared, facts.replicas)
        floor = sum(revision in serves.values() for revision in live)
        dies = any(facts.nature(revision).dies for revision in serves.values())
        if facts.whole and not dies:
            expect(floor >= facts.replicas, "never fewer ready replicas than before", f"{live} of {serves}")
        if split is None:
            continue
        expect(row is not None, "no rollout is published before it is stored", split.rollout)
        if row is None:
            continue
        surest = facts.surest[split.rollout]
        expect(
            split.share <= surest + SHARE_ERROR,
            "no share is published before it is stored",
            f"{split}, {row.rollout}",
        )
        ready = live.count(split.canary)
        carried = split.share <= 0 or replicas_for(split.share, facts.replicas) <= ready
        if row.rollout.phase is not Phase.PROMOTED:
            expect(
                carried,
                "no share exceeds what ready replicas carry",
                f"{split.share:.3f} on {ready} of {facts.replicas}",
            )


def check_agreement(standings: tuple[RolloutStanding, ...], facts: Facts) -> None:
    """After everything has ended: control knows the stored state, and the event log replays to it."""
    known = facts.truth.known()
    stored = {row.rollout.id: _state(row.rollout) for row in known.rollouts}
    told = {standing.rollout.id: _state(standing.rollout) for standing in standings}
    facts.event_log.expect(told == stored, "control and store agree", f"{told} {stored}")
    targets, rollouts = replay(facts.events())
    facts.event_log.expect(
        targets == {target.model: target for target in known.targets}
        and all(rollouts.get(row.rollout.id) == (row.rollout, row.held) for row in known.rollouts),
        "the event log replays to the stored state",
    )


def _state(rollout: Rollout) -> tuple[str, Phase, float]:
    return rollout.canary, rollout.phase, rollout.share


def check_stopped(slot: str, revision: str, facts: Facts) -> None:
    """Control asks a healthy unit to stop."""
    serves = wanted(facts.truth.known(), facts.declared, facts.replicas)
    facts.event_log.expect(serves.get(slot) != revision, "no serving replica is stopped", f"{slot} with {revision}")
