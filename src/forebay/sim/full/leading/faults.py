"""Faults of leading controls."""

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Final, Protocol

from forebay.sim.full.leading.leadership import ControllerLeadership, nothing

Undo = Callable[[], None]


class Member(Protocol):
    """One control."""

    @property
    def alive(self) -> bool:
        """Whether its process runs."""

    @property
    def leadership(self) -> ControllerLeadership | None:
        """Its lease and fence, if it is one of several."""

    def kill(self) -> None:
        """Kill it."""

    def freeze(self) -> None:
        """Stop it until it is thawed."""

    def thaw(self) -> None:
        """Continue it."""


class Field(Protocol):
    """What these faults act on."""

    @property
    def members(self) -> Sequence[Member]:
        """All controls."""

    @property
    def leader(self) -> Member | None:
        """The rightful leader, if its process runs."""

    def start(self) -> None:
        """Restart all that do not run."""


Fault = Callable[[Field, Random], Undo | None]


def _dies(field: Field, rng: Random) -> Undo | None:
    leader = field.leader
    if leader is None:
        return None
    leader.kill()
    return field.start


def _follower_dies(field: Field, rng: Random) -> Undo | None:
    leader = field.leader
    waiting = [member for member in field.members if member.alive and member is not leader]
    if not waiting:
        return None
    rng.choice(waiting).kill()
    return field.start


def _stops(field: Field, rng: Random) -> Undo | None:
    leader = field.leader
    if leader is None:
        return None
    leader.freeze()
    return leader.thaw


def _stops_acting(field: Field, rng: Random) -> Undo | None:
    """Stop the leader at its next action, after it has checked that it may act."""
    leader = field.leader
    if leader is None or leader.leadership is None:
        return None
    leadership = leader.leadership
    leadership.before_act = leader.freeze

    def undo() -> None:
        leadership.before_act = nothing
        leader.thaw()

    return undo


def _loses_store(field: Field, rng: Random) -> Undo | None:
    """The leader cannot reach the store; the others can."""
    leader = field.leader
    return None if leader is None else _without_store([leader])


def _all_lose_store(field: Field, rng: Random) -> Undo:
    return _without_store(field.members)


def _without_store(members: Iterable[Member]) -> Undo:
    stores = [member.leadership.store for member in members if member.leadership is not None]
    for store in stores:
        store.down = True

    def undo() -> None:
        for store in stores:
            store.down = False

    return undo


FAULTS: Final[dict[str, Fault]] = {
    "leader-dies": _dies,
    "follower-dies": _follower_dies,
    "leader-stops": _stops,
    "leader-stops-acting": _stops_acting,
    "leader-loses-store": _loses_store,
    "all-lose-store": _all_lose_store,
}
"""By name, in the order in which a seed draws them."""
