"""The waiting room of one model: bands, fairness between tenants, deadlines, a bound, and an honest Retry-After."""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from enum import IntEnum
from itertools import takewhile
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from forebay.core.admission.drain import RETRY_AFTER_S_MAX, WINDOW_S, DrainRate
from forebay.core.admission.line import Key, Line, Place
from forebay.core.errors import Code


class Band(IntEnum):
    """How urgent a request is; a lower number goes first."""

    SYSTEM = 0
    INTERACTIVE = 1
    DEFAULT = 2
    BATCH = 3


AGE_S: Final = {Band.INTERACTIVE: 5.0, Band.DEFAULT: 30.0, Band.BATCH: 120.0}
"""Once in so many seconds, the oldest of a band that has waited as long goes to the front of the band above.

Strict priority thus starves nobody, and a long line of batch work costs the others one place every two minutes.
"""

T = TypeVar("T")
R = TypeVar("R", bound="RunningTicket")


class Ticket:
    """What a request may claim. `work_tokens` is an estimate of prompt and answer.

    It waits until `deadline`, and who names none for the room's `timeout_s`. It should go by `due`, if that is
    earlier: among those of its tenant the earliest goes first. Whoever lets it wait longer does so up to `last`: then
    its client wants no answer any more. What clients may ask is the caller's to bound; batch work needs minutes to be
    reached by age. There is one for each request, so it is no tuple with names.
    """

    __slots__ = ("band", "deadline", "due", "last", "tenant", "work_tokens")

    def __init__(
        self,
        band: Band = Band.DEFAULT,
        tenant: str = "",
        work_tokens: float = 0.0,
        deadline: float = math.inf,
        due: float = math.inf,
        *,
        last: float = math.inf,
    ) -> None:
        self.band = band
        self.tenant = tenant
        self.work_tokens = work_tokens
        self.deadline = deadline
        self.due = due
        self.last = last

    def risen(self, band: Band) -> "Ticket":
        """The same in another band."""
        return Ticket(band, self.tenant, self.work_tokens, self.deadline, self.due, last=self.last)

    def until(self, deadline: float) -> "Ticket":
        """The same with another deadline."""
        return Ticket(self.band, self.tenant, self.work_tokens, deadline, self.due, last=self.last)


class Refused(NamedTuple, Generic[T]):
    """There is no place for `item`, a newcomer or one that had to give way to it; come back after `retry_after_s`."""

    item: T
    code: Code
    retry_after_s: int


class WaitingRoom(Generic[T]):
    """Requests that wait for a replica. `size_max` and `timeout_s` may change at any time, for newcomers.

    Iterate to see who goes next, in order, and begin anew after any change: highest band, then who was put to the
    front, then the tenant that was served the fewest tokens, then who is due first, then the first to come.
    """

    __slots__ = ("_due", "_lines", "_number", "_places", "rate", "size_max", "timeout_s")

    def __init__(self, size_max: int, timeout_s: float) -> None:
        self.size_max = size_max
        self.timeout_s = timeout_s
        self.rate = DrainRate()
        self._places: dict[T, Place[T]] = {}
        self._lines: tuple[Line[T], ...] = tuple(Line() for _ in Band)
        self._due: list[Key[T]] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[T]:
        for line in self._lines:
            yield from line

    def waiting(self) -> list[T]:
        """All items in order."""
        return list(self)

    def unordered(self) -> Iterable[T]:
        """All items; cheaper than in order."""
        return self._places

    def band(self, item: T) -> Band | None:
        """Where it waits: its ticket's band, or the one to which it has risen. None: it does not wait."""
        place = self._places.get(item)
        return None if place is None else Band(place.band)

    def ahead(self, band: Band) -> bool:
        """Whether anybody waits in this band or above it."""
        return any(self._lines[: band + 1])

    @property
    def full(self) -> bool:
        """Whether the next one to enter takes somebody's place, or finds none."""
        return len(self._places) >= self.size_max

    def enter(self, item: T, ticket: Ticket, now: float) -> Refused[T] | None:
        """Take a place in order. Returns who is refused.

        When the room is full that is the newest of the lowest band, or the item itself if nobody is below it.
        """
        refused = None
        if self.full:
            loser = self._newest_below(ticket.band)
            refused = Refused(item if loser is None else loser, Code.QUEUE_FULL, self.retry_after_s(now))
            if loser is None:
                return refused
            self.leave(loser)
        self._add(item, ticket, False, now, now)
        return refused

    def enter_again(self, item: T, ticket: Ticket, now: float, since: float | None = None) -> None:
        """Go to the front of its band: it was admitted before, so the bound does not apply. The deadline stands.

        Its age counts from `since`: who has to give way again and again is reached by age all the same.
        """
        self._add(item, ticket, True, now, now if since is None else since)

    def leave(self, item: T) -> None:
        """The item got a replica or is no longer wanted; unknown ones are ignored."""
        place = self._places.pop(item, None)
        if place is not None:
            del self._due[bisect_left(self._due, place.until)]
            self._lines[place.band].part(place)

    def expire(self, now: float) -> list[T]:
        """Take out the items whose deadline has come, earliest first.

        Call it before asking who is next: only what is due costs time.
        """
        late = [key[2] for key in takewhile(lambda key: key[0] <= now, self._due)]
        del self._due[: len(late)]
        for item in late:
            place = self._places.pop(item)
            self._lines[place.band].part(place)
        return late

    def rise(self, now: float) -> None:
        """Let who has waited long rise a band. Call it now and then."""
        for band, age_s in AGE_S.items():  # from the top, so that nobody rises twice at once
            risen = self._lines[band].rise(age_s, now)
            if risen is not None:
                risen.band, risen.front, risen.since = band - 1, True, now
                self._lines[risen.band].join(risen)

    def served(self, ticket: Ticket) -> None:
        """A request goes to a replica, from here or past an empty room: its tenant is charged the estimate."""
        self._lines[ticket.band].serve(ticket.tenant, ticket.work_tokens)

    def charge(self, ticket: Ticket, delta_tokens: float) -> None:
        """Correct what `served` charged: the actual tokens less the estimate, when the attempt has ended."""
        self._lines[ticket.band].charge(ticket.tenant, delta_tokens)

    def retry_after_s(self, now: float) -> int:
        """Whole seconds until a newcomer could expect a place: the line's length over the drain rate.

        The longest there is where somebody has waited all the time over which rates are counted, and nobody was done.
        Who is first in line leaves it within `timeout_s`, so no place takes longer, however little is known.
        """
        longest_s = min(RETRY_AFTER_S_MAX, max(1, math.ceil(self.timeout_s)))
        first = next(iter(self._places.values()), None)
        if first is not None and now - first.since > WINDOW_S and not self.rate.total(now):
            return longest_s
        return min(longest_s, self.rate.retry_after_s(len(self._places), now))

    def _add(self, item: T, ticket: Ticket, front: bool, now: float, since: float) -> None:
        assert item not in self._places, f"{item} waits already"
        self._number += 1
        deadline = ticket.deadline if ticket.deadline < math.inf else now + self.timeout_s
        key = (min(deadline, ticket.due), self._number, item)
        until = (deadline, self._number, item)
        place = self._places[item] = Place(
            key, until, tenant=ticket.tenant, band=ticket.band, front=front, since=since
        )
        self._lines[place.band].join(place)
        insort(self._due, until)

    def _newest_below(self, band: Band) -> T | None:
        for line in self._lines[:band:-1]:
            place = line.newest()
            if place is not None:
                return place.key[2]
        return None


class RunningTicket(Protocol):
    """An attempt at a replica, as far as it matters for who gives way."""

    @property
    def band(self) -> Band:
        """That of its ticket."""

    @property
    def since(self) -> float:
        """When it was sent."""

    @property
    def yields(self) -> bool:
        """Whether it may be stopped.

        Batch work may, however often, as long as nothing that its client was sent is lost or repeated; its age, which
        counts from when it came, keeps it from starving. All others may once, before anything of the answer was seen.
        """


def preempt(running: Iterable[R], waiting: Band) -> R | None:
    """Who gives way to a request of the band `waiting`: of the bands below it the lowest, there the newest."""
    chosen: R | None = None
    for attempt in running:
        if attempt.band <= waiting:
            continue
        if chosen is None or (attempt.band, attempt.since) > (chosen.band, chosen.since):
            chosen = attempt if attempt.yields else chosen
    return chosen
