"""What holds of rollouts whatever happens, looked at whenever control tells gateways something or stops a unit."""

from typing import Final, Protocol

from forebay.control.deploying import Standing
from forebay.core.deploy.course import replicas_for
from forebay.core.deploy.rollout import Phase, Rollout
from forebay.core.model import ModelRoutes
from forebay.core.routing import LIVE
from forebay.sim.full.book import Book
from forebay.sim.full.clients import MODEL
from forebay.sim.full.replica import Nature
from forebay.store.events import Event
from forebay.store.rollouts import Known, Rollouts, replay

SHARE_ERROR: Final = 1e-9


class Facts(Protocol):
    """What the rules compare."""

    book: Book
    truth: Rollouts
    """What is stored, whatever control knows of it."""
    declared: str
    """The revision of the cluster file."""
    replicas: int
    """How many there are to be."""
    whole: bool
    """Nothing happens to replicas but what their revisions bring with them."""
    surest: dict[str, float]
    """The largest share that was stored of each rollout: who has lost the store knows no better."""

    def events(self) -> list[Event]:
        """The event log."""

    def nature(self, revision: str) -> Nature:
        """What is the matter with a revision."""


def wanted(known: Known, declared: str, replicas: int) -> dict[str, str]:
    """Revisions by slot, of the replicas that are to run when no rollout is under way."""
    revision, indices = declared, tuple(range(replicas))
    for target in known.targets:
        revision, indices = target.revision, target.indices
    return {f"{MODEL}-{index}": revision for index in indices}


def note_shares(facts: Facts) -> None:
    """Something may have been stored."""
    for row in facts.truth.known().rollouts:
        stored = 1.0 if row.rollout.phase is Phase.PROMOTED else row.rollout.share
        facts.surest[row.rollout.id] = max(facts.surest.get(row.rollout.id, 0.0), stored)


def check_published(models: tuple[ModelRoutes, ...], facts: Facts) -> None:
    """A snapshot has been written."""
    known = facts.truth.known()
    rows = {row.rollout.id: row for row in known.rollouts}
    expect = facts.book.expect
    for routes in models:
        split, row = routes.split, rows.get(routes.split.rollout) if routes.split else None
        live = [each.revision for each in routes.replicas if each.state in LIVE]
        serves = wanted(known, facts.declared, facts.replicas)
        floor = sum(revision in serves.values() for revision in live)
        dies = any(facts.nature(revision).dies for revision in serves.values())
        if facts.whole and not dies:
            expect(floor >= facts.replicas, "never fewer replicas than before", f"{live} of {serves}")
        if split is None:
            continue
        expect(row is not None, "nothing is published that is not stored", split.rollout)
        if row is None:
            continue
        surest = facts.surest[split.rollout]
        expect(split.share <= surest + SHARE_ERROR, "no share before it is stored", f"{split}, {row.rollout}")
        ready = live.count(split.canary)
        carried = split.share <= 0 or replicas_for(split.share, facts.replicas) <= ready
        if row.rollout.phase is not Phase.PROMOTED:
            expect(carried, "no share that nobody can carry", f"{split.share:.3f} on {ready} of {facts.replicas}")


def check_agreement(standings: tuple[Standing, ...], facts: Facts) -> None:
    """Nothing is under way any more: control knows what is stored, and the event log tells how that came about."""
    known = facts.truth.known()
    stored = {row.rollout.id: _state(row.rollout) for row in known.rollouts}
    told = {standing.rollout.id: _state(standing.rollout) for standing in standings}
    facts.book.expect(told == stored, "control and store agree", f"{told} {stored}")
    targets, rollouts = replay(facts.events())
    facts.book.expect(
        targets == {target.model: target for target in known.targets}
        and all(rollouts.get(row.rollout.id) == (row.rollout, row.held) for row in known.rollouts),
        "the event log replays to what is stored",
    )


def _state(rollout: Rollout) -> tuple[str, Phase, float]:
    return rollout.canary, rollout.phase, rollout.share


def check_stopped(slot: str, revision: str, facts: Facts) -> None:
    """Control asks a unit to stop that runs well."""
    serves = wanted(facts.truth.known(), facts.declared, facts.replicas)
    facts.book.expect(serves.get(slot) != revision, "what serves is not stopped", f"{slot} with {revision}")
