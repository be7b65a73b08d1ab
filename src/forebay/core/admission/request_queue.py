"""The request queue of one model: priority bands, fairness between tenants, deadlines, a bound and Retry-After."""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from enum import IntEnum
from itertools import takewhile
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from forebay.core.admission.band_queue import BandQueue, Entry, Key
from forebay.core.admission.drain import RETRY_AFTER_S_MAX, WINDOW_S, DrainRate
from forebay.core.errors import Code


class Band(IntEnum):
    """Priority of a request; a lower number goes first."""

    SYSTEM = 0
    INTERACTIVE = 1
    DEFAULT = 2
    BATCH = 3


AGE_S: Final = {Band.INTERACTIVE: 5.0, Band.DEFAULT: 30.0, Band.BATCH: 120.0}
"""Ageing: at most once in this time, the oldest request of a band that has waited as long moves to the front of the
band above.

So strict priority starves no request, and a long queue of batch work costs the others one slot every two minutes.
"""

T = TypeVar("T")
R = TypeVar("R", bound="RunningTicket")


class Ticket:
    """A request's claims in the queue. `work_tokens` estimates its prompt and response.

    It waits until `deadline`, by default the queue's `timeout_s`. It should start by `due`, if that is earlier:
    within a tenant, the earliest goes first. `last`: the latest deadline that callers may extend it to; after it the
    client no longer wants a response. Callers must bound what clients may ask for; batch work needs minutes to be
    promoted by age. One is made per request, so it is not a NamedTuple.
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
        """A copy in another band."""
        return Ticket(band, self.tenant, self.work_tokens, self.deadline, self.due, last=self.last)

    def until(self, deadline: float) -> "Ticket":
        """A copy with another deadline."""
        return Ticket(self.band, self.tenant, self.work_tokens, deadline, self.due, last=self.last)


class Refused(NamedTuple, Generic[T]):
    """`item`, a new request or one displaced by it, is rejected; the client may retry after `retry_after_s`."""

    item: T
    code: Code
    retry_after_s: int


class RequestQueue(Generic[T]):
    """Requests that wait for a replica. `size_max` and `timeout_s` may change at any time and apply to new requests.

    Iteration yields items in the order in which they go; restart it after any change. Order: highest band, then items
    at the front, then the tenant that was served the fewest tokens, then earliest due, then first arrival.
    """

    __slots__ = ("_bands", "_due", "_entries", "_number", "rate", "size_max", "timeout_s")

    def __init__(self, size_max: int, timeout_s: float) -> None:
        self.size_max = size_max
        self.timeout_s = timeout_s
        self.rate = DrainRate()
        self._entries: dict[T, Entry[T]] = {}
        self._bands: tuple[BandQueue[T], ...] = tuple(BandQueue() for _ in Band)
        self._due: list[Key[T]] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        for queue in self._bands:
            yield from queue

    def waiting(self) -> list[T]:
        """All items in order."""
        return list(self)

    def unordered(self) -> Iterable[T]:
        """All items in no particular order; cheaper than in order."""
        return self._entries

    def band(self, item: T) -> Band | None:
        """The band in which it waits: its ticket's, or the one to which it was promoted. None: it is not queued."""
        entry = self._entries.get(item)
        return None if entry is None else Band(entry.band)

    def ahead(self, band: Band) -> bool:
        """Whether any request waits in this band or above it."""
        return any(self._bands[: band + 1])

    @property
    def full(self) -> bool:
        """Whether the next request displaces another one or is rejected."""
        return len(self._entries) >= self.size_max

    def enter(self, item: T, ticket: Ticket, now: float) -> Refused[T] | None:
        """Queue an item. Returns what is rejected, if anything.

        If the queue is full, that is the newest item of the lowest band, or the item itself if none is below it.
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
        """Queue an item at the front of its band: it was admitted before, so the bound does not apply and its
        deadline stands.

        Its age counts from `since`, so that an item that is preempted repeatedly is still promoted by age.
        """
        self._add(item, ticket, True, now, now if since is None else since)

    def leave(self, item: T) -> None:
        """The item got a replica or was cancelled; unknown ones are ignored."""
        entry = self._entries.pop(item, None)
        if entry is not None:
            del self._due[bisect_left(self._due, entry.until)]
            self._bands[entry.band].remove(entry)

    def expire(self, now: float) -> list[T]:
        """Remove the items whose deadline has passed, earliest first.

        Call it before asking for the next item; only expired ones cost time.
        """
        late = [key[2] for key in takewhile(lambda key: key[0] <= now, self._due)]
        del self._due[: len(late)]
        for item in late:
            entry = self._entries.pop(item)
            self._bands[entry.band].remove(entry)
        return late

    def rise(self, now: float) -> None:
        """Promote items that have waited long by one band. To be called periodically."""
        for band, age_s in AGE_S.items():  # from the top, so that no item is promoted twice at once
            promoted = self._bands[band].promote(age_s, now)
            if promoted is not None:
                promoted.band, promoted.front, promoted.since = band - 1, True, now
                self._bands[promoted.band].add(promoted)

    def served(self, ticket: Ticket) -> None:
        """A request is sent to a replica, from the queue or bypassing it: charge its tenant the estimate."""
        self._bands[ticket.band].serve(ticket.tenant, ticket.work_tokens)

    def charge(self, ticket: Ticket, delta_tokens: float) -> None:
        """Correct what `served` charged, when the attempt has ended: the actual tokens less the estimate."""
        self._bands[ticket.band].charge(ticket.tenant, delta_tokens)

    def retry_after_s(self, now: float) -> int:
        """Whole seconds until a new request can expect to be served: the queue's length over the drain rate.

        The longest time there is if a request has waited for the whole rate window and none has finished. The first
        in the queue leaves it within `timeout_s`, so no wait is longer, however little is known.
        """
        longest_s = min(RETRY_AFTER_S_MAX, max(1, math.ceil(self.timeout_s)))
        first = next(iter(self._entries.values()), None)
        if first is not None and now - first.since > WINDOW_S and not self.rate.total(now):
            return longest_s
        return min(longest_s, self.rate.retry_after_s(len(self._entries), now))

    def _add(self, item: T, ticket: Ticket, front: bool, now: float, since: float) -> None:
        assert item not in self._entries, f"{item} is already queued"
        self._number += 1
        deadline = ticket.deadline if ticket.deadline < math.inf else now + self.timeout_s
        key = (min(deadline, ticket.due), self._number, item)
        until = (deadline, self._number, item)
        entry = self._entries[item] = Entry(
            key, until, tenant=ticket.tenant, band=ticket.band, front=front, since=since
        )
        self._bands[entry.band].add(entry)
        insort(self._due, until)

    def _newest_below(self, band: Band) -> T | None:
        for queue in self._bands[:band:-1]:
            entry = queue.newest()
            if entry is not None:
                return entry.key[2]
        return None


class RunningTicket(Protocol):
    """A running attempt, as far as preemption is concerned."""

    @property
    def band(self) -> Band:
        """The band of its ticket."""

    @property
    def since(self) -> float:
        """When it was sent."""

    @property
    def yields(self) -> bool:
        """Whether it may be preempted.

        Batch work may, any number of times, as long as nothing already sent to the client is lost or repeated; its
        age, counted from its arrival, keeps it from starving. Others may once, before any of the response was seen.
        """


def preempt(running: Iterable[R], waiting: Band) -> R | None:
    """The attempt to preempt for a request of the band `waiting`: the newest of the lowest band below it."""
    chosen: R | None = None
    for attempt in running:
        if attempt.band <= waiting:
            continue
        if chosen is None or (attempt.band, attempt.since) > (chosen.band, chosen.since):
            chosen = attempt if attempt.yields else chosen
    return chosen
