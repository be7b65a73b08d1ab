"""Those who wait in one band, in the order in which they go: first who was put to the front, then by tenant.

Tenants share by tokens, after the Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models"
(OSDI 2024): next is the tenant that was served the fewest. Who begins to wait is lifted to the least counter of those
who wait already, or to that of the tenant served last if nobody does; so nobody saves up by being idle.

Every order is a sorted list: to insert or delete in one of 10,000 moves pointers, which takes about a microsecond.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, Generic, TypeAlias, TypeVar

TENANTS_MAX: Final = 10_000
"""So many counters are kept of tenants that do not wait; when there are more, all of these start anew."""

T = TypeVar("T")
Key: TypeAlias = tuple[float, int, T]
"""When it is due, number of arrival, item. Numbers are unique, so that items are never compared."""


class Place(Generic[T]):
    """Where an item waits; `since` is when it came to the band, `until` the key by which it is let go of."""

    __slots__ = ("band", "front", "key", "since", "tenant", "until")

    def __init__(self, key: Key[T], until: Key[T], *, tenant: str, band: int, front: bool, since: float) -> None:
        self.key = key
        self.tenant = tenant
        self.band = band
        self.front = front
        self.since = since
        self.until = until


class _Lane(Generic[T]):
    """One tenant's items; `rank` is its counter, the number of its first item, its name."""

    __slots__ = ("keys", "rank")

    def __init__(self, rank: tuple[float, int, str]) -> None:
        self.rank = rank
        self.keys: list[Key[T]] = []


class Line(Generic[T]):
    """The line of one band. Iterate for who goes next; stop when it has changed."""

    __slots__ = ("_arrivals", "_counters", "_front", "_front_arrivals", "_lanes", "_last", "_ranks", "_rose_at")

    def __init__(self) -> None:
        self._rose_at = float("-inf")
        self._arrivals: OrderedDict[int, Place[T]] = OrderedDict()
        self._front_arrivals: OrderedDict[int, Place[T]] = OrderedDict()
        self._front: list[Key[T]] = []
        self._lanes: dict[str, _Lane[T]] = {}
        self._ranks: list[tuple[float, int, str]] = []
        self._counters: dict[str, float] = {}
        self._last = ""

    def __bool__(self) -> bool:
        return bool(self._arrivals or self._front_arrivals)

    def __iter__(self) -> Iterator[T]:
        for key in self._front:
            yield key[2]
        for _, _, tenant in self._ranks:
            for key in self._lanes[tenant].keys:
                yield key[2]

    def join(self, place: Place[T]) -> None:
        """Take its place in order."""
        key, tenant = place.key, place.tenant
        if place.front:
            self._front_arrivals[key[1]] = place
            insort(self._front, key)
            return
        self._arrivals[key[1]] = place
        lane = self._lanes.get(tenant)
        if lane is None:
            counter = max(self._counters.get(tenant, 0.0), self._least())
            lane = self._lanes[tenant] = _Lane((counter, key[1], tenant))
            insort(self._ranks, lane.rank)
            self._set(tenant, counter)
        insort(lane.keys, key)

    def part(self, place: Place[T]) -> None:
        """Go away, for whatever reason."""
        key, tenant = place.key, place.tenant
        if place.front:
            del self._front_arrivals[key[1]]
            del self._front[bisect_left(self._front, key)]
            return
        del self._arrivals[key[1]]
        lane = self._lanes[tenant]
        del lane.keys[bisect_left(lane.keys, key)]
        if not lane.keys:
            del self._lanes[tenant]
            del self._ranks[bisect_left(self._ranks, lane.rank)]

    def newest(self) -> Place[T] | None:
        """Who came to this band last, those at the front left out."""
        return next(reversed(self._arrivals.values()), None)

    def rise(self, age_s: float, now: float) -> Place[T] | None:
        """Let go of the oldest, first those at the front, if it has waited `age_s` and nobody rose in that time."""
        if now - self._rose_at < age_s:
            return None
        oldest = min(self._front_arrivals.values(), key=_since, default=None)  # they have waited before, or elsewhere
        for place in (oldest, next(iter(self._arrivals.values()), None)):
            if place is not None and now - place.since >= age_s:
                self.part(place)
                self._rose_at = now
                return place
        return None

    def serve(self, tenant: str, tokens: float) -> None:
        """Charge the tenant for a request that goes to a replica."""
        if not self._lanes:  # it went past an empty line, or was the last in it
            self._set(tenant, max(self._counters.get(tenant, 0.0), self._least()))
        self._last = tenant
        self.charge(tenant, tokens)

    def charge(self, tenant: str, tokens: float) -> None:
        """Add to what the tenant was served; a negative number gives back."""
        counter = self._counters.get(tenant)
        if counter is None:
            counter = self._least()
        counter += tokens
        self._set(tenant, counter)
        lane = self._lanes.get(tenant)
        if lane is not None:
            del self._ranks[bisect_left(self._ranks, lane.rank)]
            lane.rank = (counter, lane.rank[1], tenant)
            insort(self._ranks, lane.rank)

    def _least(self) -> float:
        return self._ranks[0][0] if self._ranks else self._counters.get(self._last, 0.0)

    def _set(self, tenant: str, counter: float) -> None:
        self._counters[tenant] = counter
        if len(self._counters) > TENANTS_MAX + len(self._lanes):
            kept = {tenant, self._last, *self._lanes} & self._counters.keys()
            self._counters = {name: self._counters[name] for name in sorted(kept)}


def _since(place: Place[T]) -> float:
    return place.since
