"""Request queues of a model version: priority levels, each with its own policy for length and timeout.

A level is served in the order of arrival. A request that exceeds its timeout is dropped (REJECT) or moved behind
everything of its level that has not timed out (DELAY). Without ageing, levels are served strictly in order. With it,
a level is worth `age_step_s` of waiting: a request of level 3 is served as if it were one of level 1 that arrived two
steps later, and a timed-out one as if it had arrived, one level lower, when it timed out. This order never changes
while requests wait, so none is overtaken forever.
"""

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush, merge
from itertools import chain
from operator import attrgetter
from typing import Final, Generic, TypeVar

from forebay.core.serving.config import DynamicBatching, QueuePolicy, TimeoutAction
from forebay.core.serving.errors import Kind, Refused

LEVELS_KEPT_MAX: Final = 64
"""Empty levels are kept up to this many: clients choose the numbers."""

QUEUE_FULL: Final = "Exceeds maximum queue size"
"""Error text for a full queue; Triton has `[request id: …] ` before it."""

_ALARMS_PRUNED_MIN: Final = 64

T = TypeVar("T", bound=Hashable)


class Waiting(Generic[T]):
    """A queued request. `shape` must be equal within a batch; `deadline` is infinite if there is none."""

    __slots__ = ("deadline", "gone", "item", "lane", "level", "rank", "rows", "shape", "since")

    def __init__(self, item: T, rows: int, shape: Hashable, since: float, deadline: float) -> None:
        self.item = item
        self.rows = rows
        self.shape = shape
        self.since = since
        self.deadline = deadline
        self.level: Level[T]
        self.lane: Lane[T] | None = None
        """None: it is in a batch, or removed."""
        self.rank = 0.0
        """With ageing, lower ranks are served first."""
        self.gone = False


Lane = OrderedDict[Waiting[T], None]
"""Requests in scheduling order. Removal is O(1), unlike in a deque; a dict is slow at its front."""


class Level(Generic[T]):
    """One priority level, 1 is the highest; 0 if there are none."""

    __slots__ = ("fresh", "late", "number", "policy")

    def __init__(self, number: int, policy: QueuePolicy) -> None:
        self.number = number
        self.policy = policy
        self.fresh: Lane[T] = OrderedDict()
        self.late: Lane[T] = OrderedDict()

    def __len__(self) -> int:
        return len(self.fresh) + len(self.late)


class Alarms(Generic[T]):
    """Timers of requests. Those of removed requests are discarded lazily."""

    __slots__ = ("_heap", "_number", "_pruned_at")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Waiting[T]]] = []
        self._number = 0
        self._pruned_at = _ALARMS_PRUNED_MIN

    def add(self, at: float, entry: Waiting[T]) -> None:
        """Set a timer."""
        heap = self._heap
        if len(heap) >= self._pruned_at:
            heap[:] = [alarm for alarm in heap if not alarm[2].gone]
            heapify(heap)
            self._pruned_at = max(_ALARMS_PRUNED_MIN, 2 * len(heap))
        self._number += 1
        heappush(heap, (at, self._number, entry))

    def next(self) -> float:
        """When the first one is due; infinite: there is none."""
        heap = self._heap
        while heap and heap[0][2].gone:
            heappop(heap)
        return heap[0][0] if heap else math.inf

    def due(self, until: float) -> Iterator[Waiting[T]]:
        """Requests whose timers are due at that time, in order; the timers are cleared."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            entry = heappop(heap)[2]
            if not entry.gone:
                yield entry


class Queues(Generic[T]):
    """All levels of one model version. `rows` is the number of queued rows."""

    __slots__ = ("_batching", "_levels", "_timeouts", "rows")

    def __init__(self, batching: DynamicBatching) -> None:
        self._batching = batching
        self._levels: dict[int, Level[T]] = {}
        """By number, ascending."""
        self._timeouts: Alarms[T] = Alarms()
        self.rows = 0

    def add(self, entry: Waiting[T], number: int, timeout_s: float) -> None:
        """Queue a request at level `number`, or at the default one if there is no such level.

        Its own `timeout_s` (0: none) applies if the level allows it and it is shorter. Raises `Refused` (UNAVAILABLE)
        if the level is full.
        """
        level = self._level(number)
        policy = level.policy
        if policy.queue_max and len(level) >= policy.queue_max:
            raise Refused(Kind.UNAVAILABLE, QUEUE_FULL)
        entry.level = level
        entry.rank = entry.since + (level.number - 1) * self._batching.age_step_s
        entry.lane = level.fresh
        level.fresh[entry] = None
        self.rows += entry.rows
        wait_s = policy.timeout_s
        if policy.allow_override and timeout_s > 0:
            wait_s = min(timeout_s, wait_s or timeout_s)
        if wait_s > 0:
            self._timeouts.add(entry.since + wait_s, entry)

    def remove(self, entry: Waiting[T]) -> None:
        """Remove a request from its lane."""
        assert entry.lane is not None
        del entry.lane[entry]
        entry.lane = None
        self.rows -= entry.rows

    def in_order(self) -> tuple[Iterable[Waiting[T]], bool]:
        """All requests in scheduling order, and whether that is the order of arrival. Restart it after any change."""
        levels = self._levels.values()
        if len(levels) == 1:
            (level,) = levels
            if not level.late:
                return level.fresh, True
        lanes = [lane for level in levels for lane in (level.fresh, level.late) if lane]
        if self._batching.age_step_s:
            return merge(*lanes, key=attrgetter("rank")), False
        return chain.from_iterable(lanes), False

    def next_timeout(self) -> float:
        """When the next timeout expires; infinite: there is none."""
        return self._timeouts.next()

    def overdue(self, now: float) -> Iterator[Waiting[T]]:
        """Timed-out requests to be rejected, which the caller removes. The others are moved back (DELAY)."""
        for entry in self._timeouts.due(now):
            level = entry.level
            if level.policy.timeout_action is TimeoutAction.REJECT:
                yield entry
                continue
            assert entry.lane is level.fresh
            del level.fresh[entry]
            level.late[entry] = None
            entry.lane = level.late
            entry.rank = now + level.number * self._batching.age_step_s

    def _level(self, number: int) -> Level[T]:
        batching = self._batching
        if not 0 < number <= batching.levels:
            number = batching.default_level if batching.levels else 0
        level = self._levels.get(number)
        if level is None:
            policy = batching.default_policy
            level = Level(number, batching.policies.get(number, policy) if batching.levels else policy)
            levels = [level, *self._levels.values()]
            if len(levels) > LEVELS_KEPT_MAX:
                levels[1:] = [kept for kept in levels[1:] if kept]
            self._levels = {kept.number: kept for kept in sorted(levels, key=attrgetter("number"))}
        return level
