"""What may go wrong with those who lead."""

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Final, Protocol

from forebay.sim.full.leading.seats import Seat, nothing

Undo = Callable[[], None]


class Member(Protocol):
    """One control."""

    @property
    def alive(self) -> bool:
        """Whether its process runs."""

    @property
    def seat(self) -> Seat | None:
        """What makes it one of several."""

    def kill(self) -> None:
        """It is gone."""

    def freeze(self) -> None:
        """It is stopped, and does nothing until it is thawed."""

    def thaw(self) -> None:
        """It goes on as if nothing had happened."""


class Field(Protocol):
    """What these faults work on."""

    @property
    def members(self) -> Sequence[Member]:
        """All controls."""

    @property
    def leader(self) -> Member | None:
        """Whoever leads by right, if its process runs."""

    def start(self) -> None:
        """All that do not run begin again."""


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
    """It is stopped the next time that it is about to do something, after it has made sure that it may."""
    leader = field.leader
    if leader is None or leader.seat is None:
        return None
    seat = leader.seat
    seat.before_act = leader.freeze

    def undo() -> None:
        seat.before_act = nothing
        leader.thaw()

    return undo


def _loses_store(field: Field, rng: Random) -> Undo | None:
    """The leader does not reach the store any more; the others do."""
    leader = field.leader
    return None if leader is None else _without_store([leader])


def _all_lose_store(field: Field, rng: Random) -> Undo:
    return _without_store(field.members)


def _without_store(members: Iterable[Member]) -> Undo:
    stores = [member.seat.store for member in members if member.seat is not None]
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
