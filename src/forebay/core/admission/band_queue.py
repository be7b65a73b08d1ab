"""The queue of one band: first the items at its front, then the others, fairly between tenants.

Tenants share by tokens, after the Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models"
(OSDI 2024): the tenant that was served the fewest tokens is next. A tenant that starts to wait has its counter raised
to the lowest one of the waiting tenants, or, if none waits, to that of the tenant served last, so that no tenant
builds up credit by being idle.

Every order is a sorted list: inserting into or deleting from one of 10,000 moves pointers, about a microsecond.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, Generic, TypeAlias, TypeVar

TENANTS_MAX: Final = 10_000
"""Most counters that are kept of tenants that do not wait; beyond this they are all reset."""

T = TypeVar("T")
Key: TypeAlias = tuple[float, int, T]
"""Due time, arrival number, item. Numbers are unique, so items are never compared."""


class Entry(Generic[T]):
    """A queued item. `since`: when it joined the band; `key`: its order; `until`: the key by which it expires."""

    __slots__ = ("band", "front", "key", "since", "tenant", "until")

    def __init__(self, key: Key[T], until: Key[T], *, tenant: str, band: int, front: bool, since: float) -> None:
        self.key = key
        self.tenant = tenant
        self.band = band
        self.front = front
        self.since = since
        self.until = until


class _TenantQueue(Generic[T]):
    """One tenant's items. `rank`: its counter, the arrival number of its first item, its name."""

    __slots__ = ("keys", "rank")

    def __init__(self, rank: tuple[float, int, str]) -> None:
        self.rank = rank
        self.keys: list[Key[T]] = []


class BandQueue(Generic[T]):
    """The queue of one band. Iteration yields items in order; it must stop when the queue has changed."""

    __slots__ = ("_arrivals", "_counters", "_front", "_front_arrivals", "_last", "_promoted_at", "_ranks", "_tenants")

    def __init__(self) -> None:
        self._promoted_at = float("-inf")
        self._arrivals: OrderedDict[int, Entry[T]] = OrderedDict()
        self._front_arrivals: OrderedDict[int, Entry[T]] = OrderedDict()
        self._front: list[Key[T]] = []
        self._tenants: dict[str, _TenantQueue[T]] = {}
        self._ranks: list[tuple[float, int, str]] = []
        self._counters: dict[str, float] = {}
        self._last = ""

    def __bool__(self) -> bool:
        return bool(self._arrivals or self._front_arrivals)

    def __iter__(self) -> Iterator[T]:
        for key in self._front:
            yield key[2]
        for _, _, tenant in self._ranks:
            for key in self._tenants[tenant].keys:
                yield key[2]

    def add(self, entry: Entry[T]) -> None:
        """Insert in order."""
        key, tenant = entry.key, entry.tenant
        if entry.front:
            self._front_arrivals[key[1]] = entry
            insort(self._front, key)
            return
        self._arrivals[key[1]] = entry
        tenant_queue = self._tenants.get(tenant)
        if tenant_queue is None:
            counter = max(self._counters.get(tenant, 0.0), self._least())
            tenant_queue = self._tenants[tenant] = _TenantQueue((counter, key[1], tenant))
            insort(self._ranks, tenant_queue.rank)
            self._set(tenant, counter)
        insort(tenant_queue.keys, key)

    def remove(self, entry: Entry[T]) -> None:
        """Remove."""
        key, tenant = entry.key, entry.tenant
        if entry.front:
            del self._front_arrivals[key[1]]
            del self._front[bisect_left(self._front, key)]
            return
        del self._arrivals[key[1]]
        tenant_queue = self._tenants[tenant]
        del tenant_queue.keys[bisect_left(tenant_queue.keys, key)]
        if not tenant_queue.keys:
            del self._tenants[tenant]
            del self._ranks[bisect_left(self._ranks, tenant_queue.rank)]

    def newest(self) -> Entry[T] | None:
        """The most recent arrival in this band, not counting those at the front."""
        return next(reversed(self._arrivals.values()), None)

    def promote(self, age_s: float, now: float) -> Entry[T] | None:
        """Remove and return the oldest item (front first) if it has waited `age_s` and none was promoted in that
        time."""
        if now - self._promoted_at < age_s:
            return None
        # they have waited before, or in another band
        oldest = min(self._front_arrivals.values(), key=_since, default=None)
        for entry in (oldest, next(iter(self._arrivals.values()), None)):
            if entry is not None and now - entry.since >= age_s:
                self.remove(entry)
                self._promoted_at = now
                return entry
        return None

    def serve(self, tenant: str, tokens: float) -> None:
        """Charge the tenant for a request that is sent to a replica."""
        if not self._tenants:  # it bypassed an empty queue, or was the last in it
            self._set(tenant, max(self._counters.get(tenant, 0.0), self._least()))
        self._last = tenant
        self.charge(tenant, tokens)

    def charge(self, tenant: str, tokens: float) -> None:
        """Add tokens to the tenant's counter; a negative number refunds."""
        counter = self._counters.get(tenant)
        if counter is None:
            counter = self._least()
        counter += tokens
        self._set(tenant, counter)
        tenant_queue = self._tenants.get(tenant)
        if tenant_queue is not None:
            del self._ranks[bisect_left(self._ranks, tenant_queue.rank)]
            tenant_queue.rank = (counter, tenant_queue.rank[1], tenant)
            insort(self._ranks, tenant_queue.rank)

    def _least(self) -> float:
        return self._ranks[0][0] if self._ranks else self._counters.get(self._last, 0.0)

    def _set(self, tenant: str, counter: float) -> None:
        self._counters[tenant] = counter
        if len(self._counters) > TENANTS_MAX + len(self._tenants):
            kept = {tenant, self._last, *self._tenants} & self._counters.keys()
            self._counters = {name: self._counters[name] for name in sorted(kept)}


def _since(entry: Entry[T]) -> float:
    return entry.since
