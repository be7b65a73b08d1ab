"""A model's first minute: requests waiting for full replicas are enough to scale out, and nothing else is."""

import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.scaling.autoscaled_model import QUIET, T0, turns

from forebay.core.scaling.decide import decide
from forebay.core.scaling.learned import FULL_S, FULL_TIMES
from forebay.core.scaling.settings import Pace, Scale
from forebay.core.scaling.state import AutoscalerState
from forebay.core.scaling.values import Decision, Reading, Reason

PLACES = 4


@dataclass
class Crowd:
    """Clients that each wait for their answer before they ask again, before replicas with four places each."""

    scale: Scale
    clients: int
    answer_s: float = 2.0
    cold_s: float = 10.0
    replicas: int = 1
    now: float = T0
    state: AutoscalerState = field(default_factory=AutoscalerState)
    decisions: list[Decision] = field(default_factory=list)
    _starts: list[float] = field(default_factory=list)

    def look(self, known: bool = True) -> Decision:
        """A second."""
        self.now += 1.0
        self._starts = [at for at in self._starts if at > self.now]
        ready = self.replicas - len(self._starts)
        held = min(self.clients, ready * PLACES)
        done = round(held / self.answer_s)
        reading = replace(
            QUIET, at=self.now, since_s=1.0, ready=ready, pending=len(self._starts), arrivals=done,
            prompt_tokens=100 * done, completions=done, output_tokens=50 * done, waiting=self.clients - held,
            in_flight=float(self.clients), busy=held / ready / PLACES if ready else None, cold_start_s=self.cold_s,
        )  # fmt: skip
        decision, self.state = decide(
            self.scale, self.state, reading if known else None, self.now, current=self.replicas
        )
        more = decision.wanted - self.replicas
        self._starts = self._starts + [self.now + self.cold_s] * more if more > 0 else self._starts[: more or None]
        self.replicas = decision.wanted
        self.decisions.append(decision)
        return decision

    def wanted(self, seconds: int) -> list[int]:
        return [self.look().wanted for _ in range(seconds)]


@pytest.mark.parametrize(
    ("clients", "most", "first", "minute"),
    [
        (16, 4, 2, 4),  # 1, 2 after five seconds, 4 after the second one has started and is full too
        (16, 2, 2, 2),
        (16, 1, 1, 1),
        (8, 8, 2, 2),
        (5, 8, 2, 2),
        (4, 8, 1, 1),
        (0, 8, 1, 1),
        (60, 8, 2, 8),
    ],
)
def test_waiting_requests_at_full_replicas_add_one_within_seconds(
    clients: int, most: int, first: int, minute: int
) -> None:
    crowd = Crowd(Scale(most), clients)

    wanted = crowd.wanted(58)

    assert set(wanted[: int(FULL_S) - 1]) == {1}
    assert wanted[int(FULL_S) + 1] == first
    assert wanted[-1] == minute
    assert (Reason.PANIC in {each.reason for each in crowd.decisions}) == (minute > 1)


def test_first_minute_scales_as_in_the_documentation() -> None:
    wanted = [1, *Crowd(Scale(4), 16).wanted(60)]
    changes = [(second, many) for second, many in enumerate(wanted) if second and many != wanted[second - 1]]

    assert changes == [(5, 2), (19, 4)]


def test_reason_names_waiting_requests_and_full_replicas() -> None:
    crowd = Crowd(Scale(8), 16)
    crowd.wanted(int(FULL_S))

    assert crowd.decisions[-1].why == "requests have waited for 5 s, 12 now, and the one replica is full: trying 2"
    crowd.wanted(15)
    whys = {each.why for each in crowd.decisions if each.reason is Reason.PANIC}
    assert "requests have waited for 5 s, 8 now, and all 2 replicas are full: trying 4" in whys


@pytest.mark.parametrize(
    "seen",
    [
        {"busy": 0.5},  # one session waits for its own replica, say
        {"busy": None},
        {"waiting": 0},
        {"pending": 1},
        {"ready": 0, "busy": None},
    ],
    ids=str,
)
def test_insufficient_evidence_changes_nothing(seen: dict[str, object]) -> None:
    full: dict[str, object] = {"ready": 2, "waiting": 3, "in_flight": 11.0, "busy": 1.0}
    state, wanted = AutoscalerState(), set()
    for second in range(1, 31):
        reading = replace(QUIET, at=T0 + second, since_s=1.0, **(full | seen))  # type: ignore[arg-type] # by name
        decision, state = decide(Scale(9), state, reading, reading.at, current=2)
        wanted.add(decision.wanted)

    assert wanted == {2}


def test_reason_mentions_that_there_was_recently_no_replica() -> None:
    asleep = replace(QUIET, at=T0 + 1, since_s=1.0, ready=0, pending=1, waiting=1, in_flight=1.0)
    awake = replace(QUIET, at=T0 + 9, since_s=8.0, ready=1, arrivals=1, prompt_tokens=9, completions=1)
    state, whys = AutoscalerState(), []
    for reading in (asleep, awake, replace(awake, at=T0 + 130, since_s=121.0)):
        decision, state = decide(Scale(9), state, reading, reading.at, current=1)
        whys.append(decision.why)

    assert whys[1] == "too little is known about the load yet: there was no replica 8 s ago"
    assert "there was no replica" not in whys[2]


def looks(readings: list[Reading]) -> Decision:
    state = AutoscalerState()
    for reading in readings:
        decision, state = decide(Scale(9), state, reading, reading.at, current=2)
    return decision


def full(second: int, waiting: int = 3) -> Reading:
    return replace(QUIET, at=T0 + second, since_s=1.0, ready=2, waiting=waiting, in_flight=8.0 + waiting, busy=1.0)


def test_short_idle_moments_do_not_reset_the_overload_timer_but_a_gap_does() -> None:
    some = [full(second) if second % 4 else replace(full(second), busy=0.8) for second in range(1, 12)]

    assert looks([full(second) for second in range(1, 5)]).wanted == 2
    assert looks(some).wanted == 3
    assert looks([*(full(second) for second in range(1, 5)), full(100), full(101)]).wanted == 2
    assert looks([replace(full(1), since_s=60.0)]).wanted == 2, "one look is none"


def test_early_scale_out_obeys_the_window_and_rate_of_up() -> None:
    assert Crowd(Scale(9, up=Pace(30.0)), 16).wanted(25)[-1] == 1
    assert max(Crowd(Scale(9, up=Pace(0.0, 1, 60.0)), 64, cold_s=1.0).wanted(50)) == 2


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 80),
    st.integers(1, 3),
    st.integers(3, 12),
    st.integers(1, 30),
    st.lists(st.booleans(), max_size=20),
)
def test_early_scaling_stays_within_bounds_and_does_not_flap(
    clients: int, low: int, high: int, cold_s: int, known: list[bool]
) -> None:
    crowd = Crowd(Scale(high, low), clients, cold_s=float(cold_s), replicas=low)
    wanted = [low]
    for is_known in (*known, *[True] * 40):
        wanted.append(crowd.look(is_known).wanted)
        assert low <= wanted[-1] <= high
        assert is_known or wanted[-1] >= wanted[-2]
    assert turns(wanted) == 0
    assert max(wanted) <= max(low, FULL_TIMES * math.ceil(clients / PLACES), 1)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 50), st.integers(0, 50))
def test_more_waiting_requests_start_more_replicas(waiting: int, more: int) -> None:
    few, many = (looks([full(second, some) for second in range(1, 9)]) for some in (waiting, waiting + more))

    assert many.wanted >= few.wanted
