"""The dynamic batcher of a served model version: which requests run together, and when, by Triton's rules.

They are those of `GetDynamicBatch` in Triton's `dynamic_batch_scheduler.cc`, of `scheduler_utils.cc` (queues) and of
`instance_queue.cc` (batches that wait for an instance):

- Sizes are in rows; a request may have several. Requests are examined in scheduling order, until one would make the
  batch larger than `max_batch` or has another shape.
- The largest possible batch of a preferred size goes at once, unless the oldest request has waited for `delay_s`:
  then everything that fits goes. Without preferred sizes `max_batch` is the only one. A smaller batch is delayed by
  up to `delay_s`; without a delay it goes at once.
- If requests can neither time out nor be rejected and there are no levels, batches are formed while all instances are
  busy, up to two per instance, and the last one keeps growing until it is taken: to the next preferred size, by
  requests that have waited for `delay_s`, or by any request if its size is not preferred. With preferred sizes 1, 4
  and 8, eleven requests that arrive one by one thus become 1 + 9 + 1. When a batch is taken, batches behind it that
  have waited for `delay_s` join it if they fit. Otherwise a batch is formed when an instance is free for it.

Keeping responses in order (`preserve_ordering`) is up to the sender of the responses.

Usage: call `poll` after every `offer` while an instance is free, and when one becomes free, until there is no batch;
also at the time of `WaitUntil` if an instance is free then. Growth while busy needs no calls. Call `expired` at
`next_expiry`, whether instances are free or not.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from forebay.core.batching import Idle, WaitUntil
from forebay.core.serving.config import DynamicBatching
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.queues import QUEUE_FULL, Alarms, Queues, Waiting

__all__ = ["QUEUE_FULL", "TIMEOUT_EXPIRED", "Batch", "Batcher", "Idle", "WaitUntil"]

WAITING_MAX: Final = 65_536
"""Most queued requests of a model version, whatever its policies allow: each of them holds its tensors."""

FORMED_PER_INSTANCE: Final = 2
"""Batches formed ahead per instance; Triton's number."""

DEADLINE_SLACK_S: Final = 0.005
"""A batch is not delayed beyond this long before it must start, as timers fire late."""

TIMEOUT_EXPIRED: Final = "Request timeout expired"
"""Error text for requests returned by `Batcher.expired` (UNAVAILABLE); Triton puts no request id before it."""

RUN_SHARE: Final = 0.2
"""Weight of the last batch in the learned run time."""
DOUBT: Final = 0.9
"""Factor applied to the learned run time after a request was rejected because of it."""

T = TypeVar("T", bound=Hashable)

_IDLE: Final = Idle()


class Batch(NamedTuple, Generic[T]):
    """Run these together. They are no longer queued."""

    items: list[T]
    """In scheduling order."""
    rows: int


class _Forming(Generic[T]):
    """A batch that waits for an instance."""

    __slots__ = ("entries", "rows", "shape", "since")

    def __init__(self, shape: Hashable) -> None:
        self.entries: list[Waiting[T]] = []
        self.rows = 0
        self.shape = shape
        self.since = math.inf
        """When the first of them arrived."""


class _Look(Generic[T]):
    """What could join a batch now."""

    __slots__ = ("best", "closes", "due", "pending", "rows", "stopped")

    def __init__(
        self, pending: list[Waiting[T]], rows: int, best: int, due: float, *, stopped: bool, closes: bool
    ) -> None:
        self.pending = pending
        self.rows = rows
        self.best = best
        """The first `best` requests of `pending` make the largest preferred size; 0: none."""
        self.due = due
        """When they must run even without a preferred size."""
        self.stopped = stopped
        """The next request cannot join, now or later."""
        self.closes = closes
        """The next request exceeds all preferred sizes."""


class Pace:
    """The run time of batches: an exponentially weighted mean."""

    __slots__ = ("run_s",)

    def __init__(self) -> None:
        self.run_s = 0.0
        """0: unknown."""

    def note(self, took_s: float) -> None:
        """Record the run time of a batch."""
        self.run_s += (took_s - self.run_s) * (RUN_SHARE if self.run_s else 1.0)

    def doubt(self) -> None:
        """A request was rejected because of the learned time: reduce it, else one slow batch could block all later
        ones."""
        self.run_s *= DOUBT


class Batcher(Generic[T]):
    """Queued requests of one model version. Times are the caller's monotonic clock, seconds.

    `batching` None: every request is its own batch. `instances` and `run_s`, the expected run time of a batch, may be
    set at any time; `run_s` only affects requests that have a deadline. Items are compared by their hashes and must
    be distinct; identity hashes are the cheapest.
    """

    def __init__(self, batching: DynamicBatching | None, max_batch: int, *, instances: int = 1) -> None:
        alone = batching is None
        batching = batching or DynamicBatching()
        self.instances = instances
        self.run_s = 0.0
        self._rows_max = 1 if alone else max(1, max_batch)
        self._preferred = sorted(set(batching.preferred_sizes)) or [self._rows_max]
        self._delay_s = batching.delay_s
        self._ahead = not (alone or batching.has_policy)
        """Whether batches are formed while all instances are busy."""
        self._queues: Queues[T] = Queues(batching)
        self._deadlines: Alarms[T] = Alarms()
        self._waiting: dict[T, Waiting[T]] = {}
        self._formed: deque[_Forming[T]] = deque()
        self._growing: _Forming[T] | None = None
        """The last of those, unless nothing may join it."""
        self._held: WaitUntil | None = None
        """No batch is formed before that time unless a relevant change occurs: all queued requests were examined,
        have one shape, and are fewer rows than `_held_rows`."""
        self._held_rows = 0
        self._held_shape: Hashable = None
        self._expired: list[T] = []
        self._expired_at = math.inf

    def __len__(self) -> int:
        """Queued requests, including those in batches that wait for an instance."""
        return len(self._waiting)

    def offer(
        self,
        item: T,
        *,
        rows: int,
        shape: Hashable,
        level: int,
        timeout_s: float,
        now: float,
        deadline: float | None = None,
        waited_s: float = 0.0,
    ) -> None:
        """Queue a request. `level` and `timeout_s` are those it asks for itself, 0 for none.

        It is delayed for a larger batch as if it had come `waited_s` before `now`; its timeout counts from `now`.

        `shape` is all that must be equal within a batch: names and shapes of inputs, except ragged ones, and values
        of shape tensors. After `deadline` its response is useless. Raises `Refused` (UNAVAILABLE), without effect, if
        the queue is full.
        """
        assert item not in self._waiting, "it is already queued"
        self._expire(now)
        if len(self._waiting) >= WAITING_MAX:
            raise Refused(Kind.UNAVAILABLE, QUEUE_FULL)
        entry = Waiting(item, max(1, rows), shape, now, math.inf if deadline is None else deadline)
        if deadline is None and self._joins(entry):
            self._waiting[item] = entry
            return
        queues = self._queues
        queues.add(entry, level, timeout_s)
        entry.since -= waited_s
        self._waiting[item] = entry
        if deadline is not None:
            self._deadlines.add(deadline, entry)
        held = self._held
        if held is not None:
            alike = queues.rows < self._held_rows and shape == self._held_shape and deadline is None
            if alike and now < held.at <= entry.since + self._delay_s:
                return
            self._held = None
        if self._ahead:
            self._form(now)

    def cancel(self, item: T) -> bool:
        """Remove a request. False: it is not (or no longer) queued."""
        entry = self._waiting.get(item)
        if entry is None:
            return False
        self._drop(entry)
        return True

    def poll(self, now: float) -> Batch[T] | WaitUntil | Idle:
        """What a free instance should do: run a batch, poll again at that time, or nothing."""
        self._expire(now)
        formed = self._formed
        if self._held is None or now >= self._held.at:
            self._held = None
            if formed:
                self._form(now)
            elif self._queues.rows:
                self._grow(now)
        if not formed:
            return self._held or _IDLE
        batch = self._take(now)
        if self._ahead:
            self._form(now)
        return batch

    def expired(self, now: float) -> Sequence[T]:
        """Requests dropped since the last call because they timed out or cannot meet their deadline."""
        self._expire(now)
        expired, self._expired, self._expired_at = self._expired, [], math.inf
        return expired

    @property
    def next_expiry(self) -> float | None:
        """When `expired` should be called next, possibly in the past; None: nothing to expire."""
        at = min(self._expired_at, self._queues.next_timeout(), self._deadlines.next() - self.run_s)
        return None if at == math.inf else at

    def _expire(self, now: float) -> None:
        for entry in self._queues.overdue(now):
            self._reject(entry, now)
        for entry in self._deadlines.due(now + self.run_s):
            self._reject(entry, now)

    def _reject(self, entry: Waiting[T], now: float) -> None:
        self._drop(entry)
        self._expired.append(entry.item)
        self._expired_at = min(self._expired_at, now)

    def _drop(self, entry: Waiting[T]) -> None:
        entry.gone = True
        del self._waiting[entry.item]
        self._held = None
        if entry.lane is not None:
            self._queues.remove(entry)
            return
        forming = next(forming for forming in self._formed if entry in forming.entries)
        forming.entries.remove(entry)
        forming.rows -= entry.rows
        forming.since = min((each.since for each in forming.entries), default=math.inf)
        if not forming.entries:
            self._formed.remove(forming)
            if forming is self._growing:
                self._growing = None

    def _take(self, now: float) -> Batch[T]:
        """The first formed batch, merged with those behind it that are overdue and fit."""
        formed = self._formed
        first = formed.popleft()
        entries, rows = first.entries, first.rows
        last = first
        while (
            formed
            and self._delay_s
            and now - formed[0].since > self._delay_s
            and formed[0].shape == first.shape
            and rows + formed[0].rows <= self._rows_max
        ):
            last = formed.popleft()
            entries += last.entries
            rows += last.rows
        if last is self._growing:
            self._growing = self._held = None
        items = []
        for entry in entries:
            entry.gone = True
            del self._waiting[entry.item]
            items.append(entry.item)
        return Batch(items, rows)

    def _joins(self, entry: Waiting[T]) -> bool:
        """Add a new request to the batch that grows, if it would join that at once and leave it growing; what `_grow`
        would do, without looking at queues that are empty."""
        growing = self._growing
        if growing is None or self._queues.rows or not self._grows or entry.shape != growing.shape:
            return False
        size = growing.rows + entry.rows
        if size >= self._preferred[-1] or size in self._preferred or growing.rows in self._preferred:
            return False
        growing.entries.append(entry)
        growing.rows = size
        growing.since = min(growing.since, entry.since)
        return True

    @property
    def _grows(self) -> bool:
        """Whether batches are formed now although no instance is free for them."""
        return self._ahead and self._held is None and len(self._formed) < FORMED_PER_INSTANCE * self.instances

    def _form(self, now: float) -> None:
        """Form batches ahead."""
        while self._queues.rows and self._grows and self._grow(now):
            pass

    def _grow(self, now: float) -> bool:
        """Begin a batch, or grow the last one. False: nothing more to do for now."""
        growing = self._growing
        base = growing.rows if growing is not None else 0
        look = self._look(now, growing)
        pending, rows, due, closes = look.pending, look.rows, look.due, look.closes
        if look.best and now < due:
            del pending[look.best :]
            closes = closes or not self._delay_s
        elif not pending:
            if closes:
                self._growing = None
            return closes
        elif look.stopped or base + rows >= self._preferred[-1]:
            closes = True
        elif self._delay_s and now < due and (not base or base in self._preferred):
            self._held = WaitUntil(due)
            self._held_rows = self._preferred[bisect_right(self._preferred, base + rows)] - base
            self._held_shape = pending[0].shape
            return False
        if growing is None:
            growing = _Forming(pending[0].shape)
            self._formed.append(growing)
        for entry in pending:
            self._queues.remove(entry)
            growing.rows += entry.rows
            growing.since = min(growing.since, entry.since)
        growing.entries += pending
        self._growing = None if closes else growing
        return True

    def _look(self, now: float, growing: _Forming[T] | None) -> _Look[T]:
        """What could join that batch, or make a new one."""
        base, shape = (0, None) if growing is None else (growing.rows, growing.shape)
        preferred_max = self._preferred[-1]
        delay_s = self._delay_s or math.inf
        lead_s = self.run_s + DEADLINE_SLACK_S
        pending: list[Waiting[T]] = []
        size, best, due = base, 0, math.inf
        stopped = closes = False
        order, by_age = self._queues.in_order()
        for entry in order:
            larger = size + entry.rows
            if size:
                if larger > preferred_max:
                    if not best:
                        best, closes = len(pending), True
                    if best and by_age and now < due:
                        break  # no later request has waited longer: use `best`
                if larger > self._rows_max or entry.shape != shape:
                    stopped = True
                    break
            else:
                shape = entry.shape
            pending.append(entry)
            size = larger
            due = min(due, entry.since + delay_s, entry.deadline - lead_s)
            if size in self._preferred:
                best = len(pending)
        return _Look(pending, size - base, best, due, stopped=stopped, closes=closes)
