"""The waiting room: bounded, in order, with deadlines; Retry-After follows the drain rate."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from forebay.core.admission import RETRY_AFTER_S_MAX, DrainRate, Refused, WaitingRoom
from forebay.core.errors import Code


def test_items_wait_in_order_and_a_full_room_refuses() -> None:
    waiting: WaitingRoom[str] = WaitingRoom(2, 60.0)
    assert waiting.enter("a", 0.0) is None
    assert waiting.enter("b", 0.0) is None
    assert waiting.enter("c", 0.0) == Refused(Code.QUEUE_FULL, RETRY_AFTER_S_MAX)
    assert waiting.waiting() == ["a", "b"]
    waiting.leave("a")
    waiting.leave("never there")
    assert waiting.enter("c", 0.0) is None
    assert waiting.waiting() == ["b", "c"]


def test_a_room_of_size_zero_refuses_everyone() -> None:
    assert WaitingRoom[str](0, 60.0).enter("a", 0.0) is not None


def test_deadlines_take_items_out_and_are_kept_on_a_second_entry() -> None:
    waiting: WaitingRoom[str] = WaitingRoom(2, 10.0)
    waiting.enter("a", 0.0)
    waiting.enter("b", 5.0)
    waiting.enter_again("c", deadline=12.0)
    assert waiting.waiting() == ["c", "a", "b"]
    assert waiting.expire(9.9) == []
    assert waiting.expire(12.0) == ["c", "a"]
    assert waiting.waiting() == ["b"]


def test_retry_after_is_the_length_of_the_line_over_the_drain_rate() -> None:
    waiting: WaitingRoom[int] = WaitingRoom(100, 60.0)
    for n in range(39):
        waiting.enter(n, 100.0)
    for n in range(40):
        waiting.rate.count(100.0 + n / 5)
    assert waiting.rate.per_s(108.0) == 4.0
    assert waiting.retry_after_s(108.0) == 10
    assert waiting.retry_after_s(108.0 + 20) == RETRY_AFTER_S_MAX


def test_old_completions_are_forgotten() -> None:
    rate = DrainRate()
    rate.count(3.0)
    assert rate.per_s(12.9) == 0.1
    assert rate.per_s(13.0) == 0.0
    rate.count(1e9)
    assert rate.per_s(1e9) == 0.1


@given(st.lists(st.floats(0, 100), max_size=50), st.integers(0, 2000))
def test_retry_after_is_always_between_one_second_and_a_minute(finished: list[float], length: int) -> None:
    waiting: WaitingRoom[int] = WaitingRoom(length, 60.0)
    for n in range(length):
        waiting.enter(n, 0.0)
    for at in sorted(finished):
        waiting.rate.count(at)
    assert 1 <= waiting.retry_after_s(100.0) <= RETRY_AFTER_S_MAX


class Rooms(RuleBasedStateMachine):
    """The room against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.room: WaitingRoom[int] = WaitingRoom(3, 10.0)
        self.model: list[tuple[int, float]] = []
        self.now = 0.0
        self.next = 0

    @rule()
    def enter(self) -> None:
        self.next += 1
        refused = self.room.enter(self.next, self.now)
        assert (refused is not None) == (len(self.model) >= 3)
        if refused is None:
            self.model.append((self.next, self.now + 10.0))

    @rule(deadline=st.floats(0, 50))
    def enter_again(self, deadline: float) -> None:
        self.next += 1
        self.room.enter_again(self.next, deadline)
        self.model.insert(0, (self.next, deadline))

    @rule(which=st.integers(1, 20))
    def leave(self, which: int) -> None:
        self.room.leave(which)
        self.model = [row for row in self.model if row[0] != which]

    @rule(passed=st.floats(0, 8))
    def time_passes(self, passed: float) -> None:
        self.now += passed
        assert self.room.expire(self.now) == [item for item, deadline in self.model if deadline <= self.now]
        self.model = [row for row in self.model if row[1] > self.now]

    @invariant()
    def same_line(self) -> None:
        assert self.room.waiting() == [item for item, _ in self.model]


TestRooms = Rooms.TestCase
