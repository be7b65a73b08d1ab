"""The dynamic batcher: which waiting items run together, and when.

Items wait in buckets of similar length, so that little of a batch is padding. A bucket is ready when it is full or
when its oldest item has waited `max_delay_s`; of the ready buckets the one with the oldest item goes first, so that
none starves. With a backlog every bucket has waited long enough, and batches leave one after the other.
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
    """What the batcher keeps to. A single item longer than `padded_length_max` still goes, alone."""

    max_batch: int
    max_delay_s: float
    queue_max: int
    padded_length_max: int
    """Most of items x longest length in a batch: bounds memory and the time that others wait for it."""


@dataclass(frozen=True, slots=True)
class Item(Generic[T]):
    """Something that waits; `length` is what padding is measured in."""

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
    """Nothing is ready before this time, unless more is offered."""

    at: float


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing waits."""


def bucket_bounds(length_max: int) -> tuple[int, ...]:
    """The largest length of each bucket, up to one that takes `length_max`."""
    bounds = [BUCKET_WIDTH_MIN]
    while bounds[-1] < length_max:
        # The shortest length of the next bucket is one more than this bound; what it may grow to follows from that.
        shortest = bounds[-1] + 1
        bounds.append(max(bounds[-1] + BUCKET_WIDTH_MIN, int(shortest * BUCKET_GROWTH)))
    return tuple(bounds)


class Batcher(Generic[T]):
    """The queue of one engine. Times are arguments; the clock is the caller's."""

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
        """Queue an item. False, without effect, if the queue is full. `id` must not wait already."""
        assert id not in self._bucket_of, f"{id} waits already"
        assert 0 < length <= self._bounds[-1], f"{id}: length {length}"
        if len(self._bucket_of) >= self._limits.queue_max:
            return False
        index = bisect_left(self._bounds, length)
        self._buckets[index][id] = Item(id, length, now)
        self._bucket_of[id] = index
        return True

    def cancel(self, id: T) -> None:
        """Forget an item; unknown ones are ignored."""
        index = self._bucket_of.pop(id, None)
        if index is not None:
            del self._buckets[index][id]

    def poll(self, now: float) -> Batch[T] | WaitUntil | Idle:
        """What to do now. A `Batch` leaves the queue with this call."""
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
