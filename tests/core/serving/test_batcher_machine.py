"""The dynamic batcher beside a naive model of the same rules, whatever comes in whatever order."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from forebay.core.serving.batcher import DEADLINE_SLACK_S, QUEUE_FULL, Batch, Batcher, Idle, WaitUntil
from forebay.core.serving.config import DynamicBatching, QueuePolicy, TimeoutAction
from forebay.core.serving.errors import Refused


@dataclass
class Request:
    """One request of the naive model."""

    item: int
    rows: int
    shape: str
    level: int
    since: float
    timeout_at: float
    deadline: float
    late_at: float = math.inf
    late_number: int = 0


@dataclass
class Formed:
    """One batch of the naive model that waits for an instance."""

    requests: list[Request]
    closed: bool = False

    @property
    def rows(self) -> int:
        return sum(request.rows for request in self.requests)


class Naive:
    """The same rules, looking at everything anew each time."""

    def __init__(self, batching: DynamicBatching, max_batch: int, instances: int, run_s: float) -> None:
        self.batching, self.max_batch, self.instances, self.run_s = batching, max_batch, instances, run_s
        policy = batching.default_policy
        self.preferred = set(batching.preferred_sizes) or {max_batch}
        self.ahead = not batching.levels and policy == QueuePolicy(timeout_action=policy.timeout_action)
        self.queue: list[Request] = []
        self.formed: list[Formed] = []
        self.late_number = 0

    def policy(self, level: int) -> QueuePolicy:
        return self.batching.policies.get(level, self.batching.default_policy)

    def __len__(self) -> int:
        return len(self.queue) + sum(len(formed.requests) for formed in self.formed)

    def ordered(self) -> list[Request]:
        step_s = self.batching.age_step_s

        def key(request: Request) -> tuple[float, ...]:
            level, late_at = max(1, request.level), request.late_at
            late = late_at < math.inf
            rank = late_at + level * step_s if late else request.since + (level - 1) * step_s
            return (rank if step_s else 0.0, level, late, request.late_number, request.item)

        return sorted(self.queue, key=key)

    def expire(self, now: float) -> list[int]:
        gone = []
        for request in sorted(self.queue, key=lambda request: (request.timeout_at, request.item)):
            if request.timeout_at <= now:
                request.timeout_at = math.inf
                if self.policy(request.level).timeout_action is TimeoutAction.DELAY:
                    self.late_number += 1
                    request.late_at, request.late_number = now, self.late_number
                else:
                    gone.append(request.item)
                    self.cancel(request.item)
        for request in [*self.queue, *(request for formed in self.formed for request in formed.requests)]:
            if request.deadline <= now + self.run_s:
                gone.append(request.item)
                self.cancel(request.item)
        return gone

    def cancel(self, item: int) -> None:
        self.queue = [request for request in self.queue if request.item != item]
        for formed in self.formed:
            formed.requests = [request for request in formed.requests if request.item != item]
        self.formed = [formed for formed in self.formed if formed.requests]

    def full(self, level: int) -> bool:
        queue_max = self.policy(level).queue_max
        return 0 < queue_max <= sum(request.level == level for request in self.queue)

    def form(self, now: float) -> None:
        while self.queue and len(self.formed) < 2 * self.instances and self.grow(now) is None:
            pass

    def grow(self, now: float) -> WaitUntil | bool | None:
        growing = self.formed[-1] if self.formed and not self.formed[-1].closed else Formed([])
        base, most, delay_s = growing.rows, max(self.preferred), self.batching.delay_s
        pending: list[Request] = []
        best, stopped = 0, False
        for request in self.ordered():
            first = [*growing.requests, *pending, request][0]
            rows = base + sum(other.rows for other in pending) + request.rows
            if request is not first:
                if rows > most and not best:
                    best, growing.closed = len(pending), True
                if rows > self.max_batch or request.shape != first.shape:
                    stopped = True
                    break
            pending.append(request)
            if rows in self.preferred:
                best = len(pending)
        rows = base + sum(request.rows for request in pending)
        urgent = min((request.deadline for request in pending), default=math.inf) - self.run_s - DEADLINE_SLACK_S
        due = min([urgent, *(request.since + delay_s for request in pending if delay_s)])
        if best and now < due:
            pending = pending[:best]
            growing.closed |= not delay_s
        elif not pending:
            return None if growing.closed else False
        elif stopped or rows >= most:
            growing.closed = True
        elif delay_s and now < due and not (base and base not in self.preferred):
            return WaitUntil(due)
        growing.requests += pending
        self.queue = [request for request in self.queue if request not in pending]
        if growing not in self.formed:
            self.formed.append(growing)
        return None

    def poll(self, now: float) -> tuple[list[int], int] | WaitUntil | Idle:
        wait: WaitUntil | bool | None = None
        if self.formed:
            self.form(now)
        elif self.queue:
            wait = self.grow(now)
        if not self.formed:
            return wait if isinstance(wait, WaitUntil) else Idle()
        first = self.formed.pop(0)
        while self.formed and self.batching.delay_s:
            following = self.formed[0]
            if (
                now - min(request.since for request in following.requests) <= self.batching.delay_s
                or following.requests[0].shape != first.requests[0].shape
                or first.rows + following.rows > self.max_batch
            ):
                break
            first.requests += self.formed.pop(0).requests
        if self.ahead:
            self.form(now)
        return [request.item for request in first.requests], first.rows


POLICIES = st.builds(
    QueuePolicy,
    timeout_action=st.sampled_from(TimeoutAction),
    timeout_s=st.sampled_from([0.0, 0.0, 1.0, 3.0]),
    allow_override=st.booleans(),
    queue_max=st.sampled_from([0, 0, 4]),
)
MAX_BATCH = 8


@st.composite
def batchings(draw: st.DrawFn) -> DynamicBatching:
    """Any configuration that Triton would load, with and without our ageing."""
    levels = draw(st.sampled_from([0, 0, 3]))
    plain = levels == 0 and draw(st.booleans())
    return DynamicBatching(
        preferred_sizes=tuple(draw(st.lists(st.integers(1, MAX_BATCH), max_size=3))),
        delay_s=draw(st.sampled_from([0.0, 1.0, 4.0])),
        levels=levels,
        default_level=2 if levels else 0,
        default_policy=QueuePolicy() if plain else draw(POLICIES),
        policies=draw(st.dictionaries(st.integers(1, 3), POLICIES)) if levels else {},
        age_step_s=draw(st.sampled_from([0.0, 0.0, 2.0])) if levels else 0.0,
    )


class Machine(RuleBasedStateMachine):
    """The batcher beside the naive model, with times that are exact in binary."""

    @initialize(batching=batchings(), instances=st.integers(1, 2), run_s=st.sampled_from([0.0, 0.5]))
    def begin(self, batching: DynamicBatching, instances: int, run_s: float) -> None:
        self.batching = batching
        self.batcher: Batcher[int] = Batcher(batching, MAX_BATCH, instances=instances)
        self.batcher.run_s = run_s
        self.naive = Naive(batching, MAX_BATCH, instances, run_s)
        self.now, self.number = 0.0, 0
        self.waiting: set[int] = set()
        self.shapes: dict[int, str] = {}
        self.rejected: list[int] = []

    @rule(
        rows=st.sampled_from([1, 1, 1, 2, 5, MAX_BATCH]),
        shape=st.sampled_from("aaaaab"),
        level=st.integers(0, 4),
        timeout_s=st.sampled_from([0.0, 0.0, 0.5, 2.0]),
        within_s=st.sampled_from([None, None, None, 0.25, 2.0, 6.0]),
    )
    def offer(self, rows: int, shape: str, level: int, timeout_s: float, within_s: float | None) -> None:
        batching = self.batching
        wanted = (level if 1 <= level <= batching.levels else batching.default_level) if batching.levels else 0
        policy = self.naive.policy(wanted)
        limits = [limit for limit in (policy.timeout_s, timeout_s if policy.allow_override else 0.0) if limit]
        deadline = None if within_s is None else self.now + within_s
        item, self.number = self.number, self.number + 1
        self.rejected += self.naive.expire(self.now)
        arguments = {"rows": rows, "shape": shape, "level": level, "timeout_s": timeout_s, "now": self.now}
        if self.naive.full(wanted):
            with pytest.raises(Refused, match=QUEUE_FULL):
                self.batcher.offer(item, deadline=deadline, **arguments)  # type: ignore[arg-type]
            return
        self.batcher.offer(item, deadline=deadline, **arguments)  # type: ignore[arg-type]
        self.waiting.add(item)
        self.shapes[item] = shape
        timeout_at = self.now + min(limits, default=math.inf)
        late_by = math.inf if deadline is None else deadline
        self.naive.queue.append(Request(item, rows, shape, wanted, self.now, timeout_at, late_by))
        if self.naive.ahead:
            self.naive.form(self.now)

    @rule(by_s=st.sampled_from([0.125, 0.5, 1.0, 4.0]))
    def wait(self, by_s: float) -> None:
        self.now += by_s

    @rule()
    def poll(self) -> None:
        self.rejected += self.naive.expire(self.now)
        todo, expected = self.batcher.poll(self.now), self.naive.poll(self.now)
        assert todo == expected
        if isinstance(todo, Batch):
            assert self.waiting.issuperset(todo.items)
            self.waiting.difference_update(todo.items)
            assert todo.rows <= MAX_BATCH
            assert len({self.shapes[item] for item in todo.items}) == 1
        else:
            assert all(self.now < request.since + self.batching.delay_s for request in self.naive.queue)
            assert isinstance(todo, WaitUntil) is bool(self.waiting - set(self.rejected))

    @rule()
    def expire(self) -> None:
        self.rejected += self.naive.expire(self.now)
        gone = self.batcher.expired(self.now)
        assert sorted(gone) == sorted(self.rejected)
        self.waiting.difference_update(gone)
        self.rejected.clear()
        after = self.batcher.next_expiry
        assert after is None or after > self.now

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.expire()
        item = data.draw(st.integers(0, self.number))
        waits = item in self.waiting
        assert self.batcher.cancel(item) is waits
        if waits:
            self.waiting.discard(item)
            self.naive.cancel(item)

    @invariant()
    def nobody_is_lost(self) -> None:
        if hasattr(self, "batcher"):
            assert len(self.naive) == len(self.waiting.difference(self.rejected))


TestMachine = Machine.TestCase
