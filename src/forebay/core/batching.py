"""The dynamic batcher: which queued items run together, and when.

Items are queued in buckets of similar length, so that little of a batch is padding. A bucket is ready when it is full
or when its oldest item has waited `max_delay_s`. Of the ready buckets, the one with the oldest item goes first, so
that none starves. With a backlog every bucket is ready, and batches leave one after the other.
"""

from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

BUCKET_WIDTH_MIN = 4
BUCKET_GROWTH = 1.125
"""An item is padded to at most this times its length, or by `BUCKET_WIDTH_MIN - 1`, whichever is more."""

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of the batcher. A single item longer than `padded_length_max` still runs, alone."""

    max_batch: int
    max_delay_s: float
    queue_max: int
    padded_length_max: int
    """Largest product of item count and longest length in a batch: bounds memory and how long a batch takes."""


@dataclass(frozen=True, slots=True)
class Item(Generic[T]):
    """A queued item; `length` is what padding is measured in."""

    id: T
    length: int
    since: float


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """Run these now, oldest first, padded to `length`."""

    ids: tuple[T, ...]
    length: int


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Nothing is ready before this time, unless more items are offered."""

    at: float


@dataclass(frozen=True, slots=True)
class Idle:
    """The queue is empty."""


def bucket_bounds(length_max: int) -> tuple[int, ...]:
    """The largest item length of each bucket; the last bucket takes `length_max`."""
    bounds = [BUCKET_WIDTH_MIN]
    while bounds[-1] < length_max:
        # The shortest item of the next bucket is one longer than this bound; its own bound follows from that.
        shortest = bounds[-1] + 1
        bounds.append(max(bounds[-1] + BUCKET_WIDTH_MIN, int(shortest * BUCKET_GROWTH)))
    return tuple(bounds)


class Batcher(Generic[T]):
    """The queue of one engine. The caller passes the current time."""

    def __init__(self, limits: BatchLimits, length_max: int) -> None:
        self._limits = limits
        self._bounds = bucket_bounds(length_max)
        self._buckets: list[dict[T, Item[T]]] = [{} for _ in self._bounds]
        self._bucket_of: dict[T, int] = {}

    def __len__(self) -> int:
        return len(self._bucket_of)

    def __contains__(self, id: object) -> bool:
        return id in self._bucket_of

    def offer(self, id: T, length: int, now: float) -> bool:
        """Queue an item. Returns False, without effect, if the queue is full. `id` must not be queued already."""
        assert id not in self._bucket_of, f"{id} is already queued"
        assert 0 < length <= self._bounds[-1], f"{id}: length {length}"
        if len(self._bucket_of) >= self._limits.queue_max:
            return False
        index = bisect_left(self._bounds, length)
        self._buckets[index][id] = Item(id, length, now)
        self._bucket_of[id] = index
        return True

    def cancel(self, id: T) -> None:
        """Remove an item; unknown ones are ignored."""
        index = self._bucket_of.pop(id, None)
        if index is not None:
            del self._buckets[index][id]

    def poll(self, now: float) -> Batch[T] | WaitUntil | Idle:
        """What to do now. A returned `Batch` is removed from the queue."""
        oldest_ready: tuple[float, int] | None = None
        due_first: float | None = None
        for index, bucket in enumerate(self._buckets):
            if not bucket:
                continue
            since = next(iter(bucket.values())).since
            due = since + self._limits.max_delay_s
            if due <= now or len(bucket) >= self._room(index):
                oldest_ready = min(oldest_ready or (since, index), (since, index))
            due_first = due if due_first is None else min(due_first, due)
        if oldest_ready is not None:
            return self._take(oldest_ready[1])
        return Idle() if due_first is None else WaitUntil(due_first)

    def _room(self, index: int) -> int:
        """How many items of a bucket make a full batch."""
        return max(1, min(self._limits.max_batch, self._limits.padded_length_max // self._bounds[index]))

    def _take(self, index: int) -> Batch[T]:
        bucket = self._buckets[index]
        items = [item for item, _ in zip(bucket.values(), range(self._room(index)), strict=False)]
        for item in items:
            del bucket[item.id]
            del self._bucket_of[item.id]
        return Batch(tuple(item.id for item in items), max(item.length for item in items))
