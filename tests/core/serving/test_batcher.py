"""The dynamic batcher: arrival patterns with the batches that Triton makes of them, and one case for every rule."""

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.serving import batcher as module
from forebay.core.serving.batcher import (
    DEADLINE_SLACK_S,
    QUEUE_FULL,
    TIMEOUT_EXPIRED,
    Batch,
    Batcher,
    Idle,
    WaitUntil,
)
from forebay.core.serving.config import DynamicBatching, QueuePolicy, TimeoutAction
from forebay.core.serving.errors import Kind, Refused

RUN_S = 0.05


def offer(target: Batcher[str], items: Iterable[str], now: float = 0.0, rows: int = 1, **changes: object) -> None:
    for item in items:
        arguments = {"shape": None, "level": 0, "timeout_s": 0.0, **changes}
        target.offer(item, rows=rows, now=now, **arguments)  # type: ignore[arg-type]


def taken(target: Batcher[str], now: float) -> str:
    batch = target.poll(now)
    assert isinstance(batch, Batch), batch
    return "".join(batch.items)


@dataclass(frozen=True)
class Come:
    """Requests that come one by one, `gap_s` apart."""

    number: int
    gap_s: float = 0.0005
    at: float = 0.0
    rows: int = 1
    shape: str = ""


@dataclass
class Played:
    """What became of them."""

    sizes: list[int] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)


def play(
    batching: DynamicBatching | None,
    pattern: list[Come],
    *,
    max_batch: int = 16,
    instances: int = 1,
    row_s: float = 0.0,
) -> Played:
    """Serve the pattern as a model server does, with batches that take `RUN_S`, and `row_s` more for each row."""
    batcher: Batcher[int] = Batcher(batching, max_batch, instances=instances)
    arrivals = sorted(
        (come.at + number * come.gap_s, come.rows, come.shape) for come in pattern for number in range(come.number)
    )
    events: list[tuple[float, int, list[int]]] = [(at, -1, [index]) for index, (at, _, _) in enumerate(arrivals)]
    heapq.heapify(events)
    free, played = instances, Played(latencies_s=[0.0] * len(arrivals))
    while events:
        now, ended, items = heapq.heappop(events)
        if ended < 0:
            _, rows, shape = arrivals[items[0]]
            batcher.offer(items[0], rows=rows, shape=shape, level=0, timeout_s=0.0, now=now)
        free += max(0, ended)
        for item in items if ended > 0 else []:
            played.latencies_s[item] = round(now - arrivals[item][0], 3)
        while free:
            todo = batcher.poll(now)
            if isinstance(todo, Batch):
                free -= 1
                played.sizes.append(todo.rows)
                heapq.heappush(events, (now + RUN_S + row_s * todo.rows, 1, todo.items))
                continue
            if isinstance(todo, WaitUntil):
                heapq.heappush(events, (todo.at, 0, []))
            break
    assert len(batcher) == 0
    return played


DELAY_S = 0.3
ELEVEN = [Come(11)]


@pytest.mark.parametrize(
    ("preferred", "delay_s", "pattern", "sizes"),
    [
        # Measured on Triton 2.51 with a delay of 300 ms, a model of 50 ms and batches of at most 16.
        ((1, 4, 8), DELAY_S, ELEVEN, [1, 9, 1]),
        ((4, 8), DELAY_S, ELEVEN, [4, 4, 3]),
        ((), DELAY_S, ELEVEN, [11]),
        # What follows from the same rules.
        ((), 0.0, ELEVEN, [1, 10]),
        ((4, 8), 0.0, ELEVEN, [1, 4, 4, 2]),
        ((1, 4, 8), 0.0, ELEVEN, [1, 1, 1, 8]),
        ((), DELAY_S, [Come(40)], [16, 16, 8]),
        ((), 0.0, [Come(40)], [1, 16, 16, 7]),
        ((8,), DELAY_S, [Come(3), Come(3, at=0.4), Come(3, at=0.44)], [3, 6]),
        ((4,), DELAY_S, [Come(1, rows=3), Come(1, rows=2, at=0.01), Come(1, rows=9, at=0.02)], [3, 2, 9]),
        ((4, 8), DELAY_S, [Come(1, rows=16), Come(2, rows=10, at=0.01)], [16, 10, 10]),
        ((8,), DELAY_S, [Come(3), Come(3, at=0.01, shape="other"), Come(2, at=0.02)], [3, 3, 2]),
    ],
)
def test_batches_equal_those_of_triton(
    preferred: tuple[int, ...], delay_s: float, pattern: list[Come], sizes: list[int]
) -> None:
    assert play(DynamicBatching(preferred, delay_s), pattern).sizes == sizes


@pytest.mark.parametrize(
    ("preferred", "delay_s", "latency_s"),
    [((1, 4, 8), DELAY_S, 0.05), ((4, 8), DELAY_S, 0.35), ((), DELAY_S, 0.35), ((4, 8), 0.0, 0.05), ((), 0.0, 0.05)],
)
def test_delay_does_not_apply_to_a_single_request_of_a_preferred_size(
    preferred: tuple[int, ...], delay_s: float, latency_s: float
) -> None:
    assert play(DynamicBatching(preferred, delay_s), [Come(1)]).latencies_s == [latency_s]


@pytest.mark.parametrize("instances", [1, 2, 4])
def test_without_batching_every_request_is_a_batch(instances: int) -> None:
    played = play(None, [Come(5, rows=3), Come(4, at=1.0)], instances=instances)
    assert played.sizes == [3] * 5 + [1] * 4


def test_queue_policies_apply_to_models_without_batching() -> None:
    batcher: Batcher[str] = Batcher(DynamicBatching(default_policy=QueuePolicy(queue_max=2)), 0)
    offer(batcher, "ab")
    with pytest.raises(Refused, match=QUEUE_FULL):
        offer(batcher, "c")
    assert [taken(batcher, 0.0), taken(batcher, 0.0)] == ["a", "b"]
    assert batcher.poll(0.0) == Idle()


@pytest.mark.parametrize(("instances", "sizes"), [(1, [2, 8, 2]), (2, [2, 2, 2, 2, 2, 2])])
def test_two_batches_are_formed_ahead_for_each_instance(instances: int, sizes: list[int]) -> None:
    """What comes later waits, and is looked at anew when a batch is taken."""
    batcher: Batcher[str] = Batcher(DynamicBatching((2, 8)), 8, instances=instances)
    offer(batcher, "abcdefghijkl")
    assert [len(taken(batcher, 0.0)) for _ in sizes] == sizes
    assert batcher.poll(0.0) == Idle()


@pytest.mark.parametrize(
    ("now", "max_batch", "shape", "batches"),
    [
        pytest.param(0.5, 16, "", ["abcd", "e"], id="it fits and has waited"),
        pytest.param(0.3, 16, "", ["abc", "d"], id="it has not waited for longer than the delay"),
        pytest.param(0.5, 4, "", ["abc", "d", "e"], id="it does not fit"),
        pytest.param(0.5, 16, "other", ["abc", "de"], id="it has another shape"),
    ],
)
def test_overdue_batch_is_merged_into_the_first_one(
    now: float, max_batch: int, shape: str, batches: list[str]
) -> None:
    batcher: Batcher[str] = Batcher(DynamicBatching((4,), DELAY_S), max_batch)
    offer(batcher, "abc", shape="")
    offer(batcher, "d", 0.01, rows=2, shape=shape)
    offer(batcher, "e", 0.02, rows=3, shape=shape)
    assert [taken(batcher, now) for _ in batches] == batches


def test_batch_delay_counts_from_the_oldest_remaining_request() -> None:
    batcher: Batcher[str] = Batcher(DynamicBatching((), DELAY_S), 8)
    offer(batcher, "abcdefg")
    offer(batcher, "h", rows=2)
    offer(batcher, "i", 2 * DELAY_S)
    assert batcher.cancel("h")
    assert [taken(batcher, 2 * DELAY_S) for _ in range(2)] == ["abcdefg", "i"]


def test_batch_delay_includes_the_time_in_which_a_request_was_not_read() -> None:
    batcher: Batcher[str] = Batcher(DynamicBatching((), DELAY_S), 8)
    offer(batcher, "a", 1.0, waited_s=0.25 * DELAY_S)
    assert batcher.poll(1.0) == WaitUntil(1.0 + 0.75 * DELAY_S)
    offer(batcher, "b", 1.0, waited_s=2 * DELAY_S)
    assert taken(batcher, 1.0) == "ab"


def test_batch_is_closed_by_a_request_of_another_shape() -> None:
    batcher: Batcher[str] = Batcher(DynamicBatching((8,), DELAY_S), 8)
    offer(batcher, "ab")
    assert batcher.poll(0.0) == WaitUntil(DELAY_S)
    offer(batcher, "c", 0.1, shape="other")
    assert taken(batcher, 0.1) == "ab"
    assert batcher.poll(0.1) == WaitUntil(0.1 + DELAY_S)


def test_a_request_that_times_out_leaves_even_while_a_batch_is_held_back() -> None:
    batcher: Batcher[str] = Batcher(
        DynamicBatching((4,), DELAY_S, default_policy=QueuePolicy(timeout_s=0.2, allow_override=True)), 8
    )
    assert batcher.next_expiry is None
    offer(batcher, "a", timeout_s=0.1)
    assert batcher.poll(0.0) == WaitUntil(DELAY_S)
    assert batcher.next_expiry == 0.1
    offer(batcher, "b", 0.15)
    assert batcher.next_expiry == 0.15
    assert batcher.expired(0.15) == ["a"]
    assert batcher.next_expiry == pytest.approx(0.35)
    assert batcher.poll(0.16) == WaitUntil(0.15 + DELAY_S)
    assert batcher.poll(0.35) == Idle()
    assert (batcher.expired(0.36), batcher.expired(0.36), len(batcher)) == (["b"], [], 0)
    assert TIMEOUT_EXPIRED == "Request timeout expired"


def test_timed_out_request_with_delay_action_goes_behind_its_level() -> None:
    policy = QueuePolicy(timeout_action=TimeoutAction.DELAY, timeout_s=0.1)
    batcher: Batcher[str] = Batcher(DynamicBatching((1,), default_policy=policy), 2)
    offer(batcher, "ab")
    offer(batcher, "cd", 0.05)
    assert [taken(batcher, 0.1) for _ in range(4)] == ["c", "d", "a", "b"]


def test_a_higher_level_goes_first_however_long_the_others_have_waited() -> None:
    batcher: Batcher[str] = Batcher(DynamicBatching((2,), DELAY_S, levels=2, default_level=2), 2)
    offer(batcher, "ab", 0.0)
    offer(batcher, "cd", 5.0, level=1)
    assert [taken(batcher, 5.0), taken(batcher, 5.0)] == ["cd", "ab"]


def test_a_batch_is_not_held_back_for_longer_than_its_deadlines_allow() -> None:
    batcher: Batcher[str] = Batcher(DynamicBatching((), 10.0), 4)
    batcher.run_s = 1.0
    offer(batcher, "a")
    assert batcher.poll(0.0) == WaitUntil(10.0)
    offer(batcher, "b", 1.0, deadline=5.0)
    assert batcher.poll(1.0) == WaitUntil(5.0 - 1.0 - DEADLINE_SLACK_S)
    assert batcher.next_expiry == 4.0
    assert taken(batcher, 3.995) == "ab"
    assert batcher.next_expiry is None


def test_request_that_cannot_meet_its_deadline_leaves_a_formed_batch() -> None:
    batcher: Batcher[str] = Batcher(DynamicBatching(), 4)
    offer(batcher, "a", deadline=9.0)
    offer(batcher, "b", deadline=2.0)
    batcher.run_s = 0.5
    assert batcher.expired(1.49) == []
    assert batcher.expired(1.5) == ["b"]
    offer(batcher, "c", 1.6, deadline=1.7)
    assert batcher.expired(1.6) == ["c"]
    assert taken(batcher, 1.6) == "a"


def test_a_cancelled_request_leaves_the_batch_and_makes_room() -> None:
    batcher: Batcher[str] = Batcher(DynamicBatching((4,)), 4)
    offer(batcher, "abc")
    offer(batcher, "d", shape="other")
    assert batcher.cancel("b")
    assert not batcher.cancel("b")
    offer(batcher, "e")
    assert taken(batcher, 0.0) == "ac"
    assert batcher.cancel("d")
    assert batcher.cancel("e")
    assert batcher.poll(0.0) == Idle()
    offer(batcher, "fg")
    assert taken(batcher, 0.0) == "fg"


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_batch_sizes_keep_tail_latency_near_the_optimum(share: float) -> None:
    """At a share of what full batches can do; requests come evenly, and a run costs something whatever its size."""
    most, row_s = 8, 0.45 * RUN_S
    rate = share * most / (RUN_S + most * row_s)
    rows = math.ceil(rate * RUN_S / (1 - rate * row_s))  # fewer in each run, and ever more would wait
    least_s = (rows - 1) / rate + RUN_S + rows * row_s  # the first of them waits for the last

    played = play(DynamicBatching(delay_s=0.01 * RUN_S), [Come(2000, gap_s=1 / rate)], max_batch=most, row_s=row_s)

    slowest_s = sorted(played.latencies_s)[len(played.latencies_s) * 99 // 100]
    assert least_s <= slowest_s <= 1.1 * least_s


@pytest.mark.interpreted
def test_queue_length_is_bounded_under_every_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 3)
    batcher: Batcher[str] = Batcher(DynamicBatching(), 4)
    offer(batcher, "abc")
    with pytest.raises(Refused, match=QUEUE_FULL) as refused:
        offer(batcher, "d")
    assert refused.value.kind is Kind.UNAVAILABLE
    assert taken(batcher, 0.0) == "abc"


@given(
    st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=60),
    st.sampled_from([0.5, 2.0]),
)
def test_ageing_prevents_starvation_of_priority_levels(arrivals: list[tuple[int, bool]], step_s: float) -> None:
    """Whatever is served before a request of level n has come no later than (n - 1) steps after it."""
    batcher: Batcher[tuple[int, int, float]] = Batcher(
        DynamicBatching((2,), levels=3, default_level=3, age_step_s=step_s), 2
    )
    now, served = 0.0, []
    for number, (level, busy) in enumerate(arrivals):
        now += 0.25
        batcher.offer((number, level, now), rows=1, shape=None, level=level, timeout_s=0.0, now=now)
        if not busy and isinstance(batch := batcher.poll(now), Batch):
            served += batch.items
    while isinstance(batch := batcher.poll(now), Batch):
        served += batch.items
    assert len(served) == len(arrivals)
    for place, (_, level, since) in enumerate(served):
        assert all(other[2] <= since + (level - 1) * step_s for other in served[:place])
