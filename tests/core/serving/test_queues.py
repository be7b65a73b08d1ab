"""Priority levels of a queue: order, rejection, timeouts."""

import math
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.serving.config import DynamicBatching, QueuePolicy, TimeoutAction
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.queues import LEVELS_KEPT_MAX, QUEUE_FULL, Alarms, Queues, Waiting

DELAY_1S = QueuePolicy(timeout_action=TimeoutAction.DELAY, timeout_s=1.0)


def add(queues: Queues[str], item: str, level: int = 0, *, at: float = 0.0, timeout_s: float = 0.0) -> Waiting[str]:
    entry = Waiting(item, 1, None, at, math.inf)
    queues.add(entry, level, timeout_s)
    return entry


def order(queues: Queues[str]) -> str:
    return "".join(entry.item for entry in queues.in_order()[0])


def levels(number: int, default: int = 2, **changes: object) -> DynamicBatching:
    return DynamicBatching(levels=number, default_level=default, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batching", "asked", "expected"),
    [
        pytest.param(DynamicBatching(), [0, 7, 1], "abc", id="without levels what is asked for counts nothing"),
        pytest.param(levels(3), [3, 2, 1], "cba", id="one is the highest"),
        pytest.param(levels(3), [3, 0, 1], "cba", id="zero is the default level"),
        pytest.param(levels(3), [3, 4, 1], "cba", id="a level that does not exist is the default level"),
        pytest.param(levels(2), [2, 1, 2, 1], "bdac", id="within a level the first to come is the first"),
    ],
)
def test_priority_levels_are_served_in_order(batching: DynamicBatching, asked: list[int], expected: str) -> None:
    queues: Queues[str] = Queues(batching)
    for item, level in zip("abcd", asked, strict=False):
        add(queues, item, level)
    assert order(queues) == expected


def test_a_full_level_refuses_and_the_others_do_not() -> None:
    queues: Queues[str] = Queues(levels(2, policies={1: QueuePolicy(queue_max=2)}))
    first = add(queues, "a", 1)
    add(queues, "b", 1)
    for _ in range(5):
        add(queues, "z", 2)
    with pytest.raises(Refused, match=QUEUE_FULL) as refused:
        add(queues, "c", 1)
    assert refused.value.kind is Kind.UNAVAILABLE
    assert queues.rows == 7
    queues.remove(first)
    add(queues, "c", 1)
    assert order(queues) == "bczzzzz"


def test_policies_of_levels_are_ignored_where_there_are_none() -> None:
    queues: Queues[str] = Queues(DynamicBatching(policies={0: QueuePolicy(queue_max=1)}))
    add(queues, "a")
    add(queues, "b")
    assert order(queues) == "ab"


@pytest.mark.parametrize(
    ("allowed", "default_s", "asked_s", "expected"),
    [
        (False, 0.0, 5.0, math.inf),
        (False, 8.0, 5.0, 8.0),
        (True, 8.0, 5.0, 5.0),
        (True, 8.0, 9.0, 8.0),
        (True, 8.0, 0.0, 8.0),
        (True, 0.0, 5.0, 5.0),
        (True, 0.0, 0.0, math.inf),
    ],
)
def test_a_request_may_only_shorten_its_timeout_and_only_where_that_is_allowed(
    allowed: bool, default_s: float, asked_s: float, expected: float
) -> None:
    queues: Queues[str] = Queues(
        DynamicBatching(default_policy=QueuePolicy(timeout_s=default_s, allow_override=allowed))
    )
    add(queues, "a", timeout_s=asked_s)
    assert queues.next_timeout() == expected


def test_timed_out_request_is_rejected_or_moved_behind_its_level() -> None:
    queues: Queues[str] = Queues(levels(3, policies={1: DELAY_1S, 2: QueuePolicy(timeout_s=2.0)}))
    for item, level, at in [("a", 1, 0.0), ("b", 1, 0.5), ("c", 2, 0.0), ("d", 3, 0.0), ("e", 1, 1.4)]:
        add(queues, item, level, at=at)
    assert list(queues.overdue(0.99)) == []
    assert order(queues) == "abecd"
    assert list(queues.overdue(1.6)) == []
    assert order(queues) == "eabcd"
    assert [entry.item for entry in queues.overdue(2.0)] == ["c"]
    assert queues.next_timeout() == 2.4


def test_queue_with_only_delayed_requests_serves_them() -> None:
    queues: Queues[str] = Queues(DynamicBatching(default_policy=DELAY_1S))
    entry = add(queues, "a")
    assert list(queues.overdue(1.0)) == []
    assert order(queues) == "a"
    queues.remove(entry)
    assert (order(queues), queues.rows) == ("", 0)


def test_empty_levels_are_forgotten_once_there_are_many() -> None:
    queues: Queues[str] = Queues(levels(10**6))
    for level in range(1, 10 * LEVELS_KEPT_MAX):
        queues.remove(add(queues, "a", level))
        assert len(queues._levels) <= LEVELS_KEPT_MAX
    for level in range(2 * LEVELS_KEPT_MAX, 0, -1):
        add(queues, chr(level), level)
    assert order(queues) == "".join(chr(level) for level in range(1, 2 * LEVELS_KEPT_MAX + 1))


ARRIVALS = st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0.0, 0.125, 0.5, 1.0])), min_size=1, max_size=30)


@given(ARRIVALS, st.sampled_from([0.25, 1.0]))
def test_ageing_bounds_overtaking_by_later_requests(arrivals: list[tuple[int, float]], step_s: float) -> None:
    """A request of level n is overtaken by nothing that comes later than (n - 1) steps after it."""
    queues: Queues[str] = Queues(levels(4, age_step_s=step_s))
    now, numbers = 0.0, count()
    for level, later_s in arrivals:
        now += later_s
        add(queues, str(next(numbers)), level, at=now)
    served = list(queues.in_order()[0])
    for place, entry in enumerate(served):
        for earlier in served[:place]:
            assert earlier.since <= entry.since + (entry.level.number - 1) * step_s


def test_ageing_lowers_a_delayed_request_by_one_level() -> None:
    queues: Queues[str] = Queues(levels(3, policies={1: DELAY_1S}, age_step_s=1.0))
    for item, level, at in [("a", 1, 0.0), ("b", 1, 0.9), ("c", 1, 1.9), ("d", 3, 1.9), ("e", 1, 2.1)]:
        list(queues.overdue(at))
        add(queues, item, level, at=at)
    list(queues.overdue(2.2))
    assert order(queues) == "ceabd"


def test_timers_of_removed_requests_are_discarded() -> None:
    alarms: Alarms[int] = Alarms()
    stays = Waiting(-1, 1, None, 0.0, math.inf)
    alarms.add(5.0, stays)
    for number in range(1000):
        entry = Waiting(number, 1, None, 0.0, math.inf)
        alarms.add(float(number % 10), entry)
        entry.gone = True
    assert len(alarms._heap) < 200
    assert alarms.next() == 5.0
    assert list(alarms.due(4.9)) == []
    assert list(alarms.due(5.0)) == [stays]
    assert alarms.next() == math.inf
