"""Batch and urgent requests sharing a replica: urgent ones always get a place, and batch work is resumed."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.admission import AGE_S, Band, RequestQueue, Ticket, batch_max, batch_room, crowded
from forebay.core.admission.pace import PaceLine
from forebay.core.admission.sharing import SLOWED_MAX, SPARE


@pytest.mark.parametrize(
    ("places", "line", "urgent", "before", "most"),
    [
        (8, None, 0, 3.0, math.inf),
        (8, PaceLine(0.02, 0.0), 4, 1.0, math.inf),
        (256, PaceLine(0.025, 0.00003), 0, 1.0, math.inf),  # a GPU
        (256, PaceLine(0.024, 0.0001), 60, 1.0, 100.0),
        (8, PaceLine(0.01, 0.01), 5, 1.0, 2.0),  # a CPU: every sequence adds as much
        (8, PaceLine(0.01, 0.01), 0, 8.0, 1.0),
        (8, PaceLine(0.02, None), 3, 0.0, 1.0),
        (80, PaceLine(0.02, None), 3, 0.0, 10.0),
        (80, PaceLine(0.02, None), 3, 20.0, 21.0),
        (80, PaceLine(0.02, None), 3, math.inf, 10.0),  # no stream was seen before
    ],
)
def test_batch_work_is_limited_by_its_slowdown_of_others(
    places: int, line: PaceLine | None, urgent: int, before: float, most: float
) -> None:
    assert batch_max(places, line, urgent, before) == pytest.approx(most)


@given(
    places=st.integers(1, 300), base_s=st.floats(0, 1), slope_s=st.floats(0, 1), urgent=st.integers(0, 300),
    before=st.floats(0),
)  # fmt: skip
def test_some_batch_work_always_runs_within_the_slowdown_limit(
    places: int, base_s: float, slope_s: float, urgent: int, before: float
) -> None:
    most = batch_max(places, PaceLine(base_s, slope_s), urgent, before)
    alone_s = base_s + slope_s * urgent
    assert most >= 1.0
    assert most == 1.0 or min(most, places) * slope_s <= SLOWED_MAX * alone_s * (1 + 1e-9)
    assert batch_max(places, PaceLine(base_s, None), urgent, before) >= 1.0


@pytest.mark.parametrize(
    ("places", "batch", "most", "room"),
    [(8, 0, math.inf, 7), (8, 7, math.inf, 7), (8, 2, 2.0, 0), (8, 1, 1.9, 0), (2, 0, 2.0, 1), (1, 0, 1.0, 1)],
)
def test_batch_work_leaves_a_place_free_where_there_are_several(
    places: int, batch: int, most: int, room: int
) -> None:
    assert batch_room(places, batch, most) == room


@pytest.mark.parametrize(
    ("load", "places", "batch", "most", "stopped", "steps_aside"),
    [
        (7, 8, 7, math.inf, 0, False),
        (8, 8, 1, math.inf, 0, True),
        (9, 8, 9, math.inf, 1, True),
        (9, 8, 0, math.inf, 0, False),  # who is in the way is no batch work
        (4, 8, 4, 3.0, 0, True),
        (4, 8, 4, 3.0, 1, False),  # one at a time
        (4, 8, 4, 3.5, 0, False),
    ],
)
def test_batch_work_is_preempted_where_no_place_is_free(
    *, load: int, places: int, batch: int, most: float, stopped: int, steps_aside: bool
) -> None:
    assert crowded(load, places, batch, most, stopped) is steps_aside


@dataclass
class Shared:
    """A replica that batch work without end and urgent requests share."""

    places: int
    most: int
    urgent: int = 0
    batch: list[int] = field(default_factory=list)
    """For each attempt, how many urgent requests have come since it was sent."""
    stopped: list[int] = field(default_factory=list)
    came: int = 0

    @property
    def load(self) -> int:
        return self.urgent + len(self.batch)

    def refill(self) -> None:
        while self.load < batch_room(self.places, len(self.batch), self.most):
            self.batch.append(0)

    def comes(self) -> None:
        self.came += 1
        self.batch = [seen + 1 for seen in self.batch]
        stopped = 0
        while crowded(self.load, self.places, len(self.batch), self.most, stopped):
            self.stopped.append(self.batch.pop())
            stopped += 1
        self.urgent += 1


@given(
    places=st.integers(1, 12),
    most=st.integers(1, 12),
    steps=st.lists(st.sampled_from(["comes", "comes", "goes", "batch ends", "refill"]), max_size=200),
)
def test_urgent_requests_never_queue_behind_batch_work_and_rarely_preempt_it(
    places: int, most: int, steps: list[str]
) -> None:
    replica = Shared(places, min(most, places))
    for step in steps:
        if step == "comes" and replica.urgent < places:
            replica.comes()
            assert replica.load <= places, "it waits behind batch work"
        elif step == "goes":
            replica.urgent = max(0, replica.urgent - 1)
        elif step == "batch ends" and replica.batch:
            replica.batch.pop(0)
        replica.refill()
        assert replica.batch or replica.load >= places - SPARE, "batch work could go and does not"
    assert len(replica.stopped) <= replica.came
    if places > SPARE:
        assert all(seen > SPARE for seen in replica.stopped), "it was let in for less than the next request"


@given(
    ages_s=st.lists(st.floats(0, 500), min_size=1, max_size=8),
    again_every_s=st.floats(0.1, 60),
)
def test_batch_requests_that_are_preempted_repeatedly_rise_by_age(ages_s: list[float], again_every_s: float) -> None:
    """However often they are sent and stopped, one rises in every two minutes, the oldest first."""
    room: RequestQueue[int] = RequestQueue(100, 1e6)
    ticket, now, risen = Ticket(Band.BATCH), 1000.0, []
    since = {item: now - age_s for item, age_s in enumerate(ages_s)}
    for item, at in since.items():
        room.enter_again(item, ticket, now, since=at)
    end_s = now + (AGE_S[Band.BATCH] + again_every_s) * (len(ages_s) + 1)
    while now < end_s:
        now += again_every_s
        room.rise(now)
        for item in [item for item in room if (band := room.band(item)) is not None and band < Band.BATCH]:
            room.leave(item)
            risen.append(item)
        for item in room.waiting():
            room.leave(item)
            assert room.band(item) is None
            room.enter_again(item, ticket, now, since=since[item])
    assert sorted(risen) == sorted(since)
    if all(age_s >= AGE_S[Band.BATCH] for age_s in ages_s):
        assert [since[item] for item in risen] == sorted(since.values())


def test_waiting_batch_work_does_not_precede_other_requests() -> None:
    room: RequestQueue[str] = RequestQueue(9, 60.0)
    assert not room.ahead(Band.BATCH)
    room.enter("batch", Ticket(Band.BATCH), 0.0)
    assert room.ahead(Band.BATCH)
    assert not room.ahead(Band.DEFAULT)
    room.enter_again("default", Ticket(Band.DEFAULT), 0.0)
    assert room.ahead(Band.DEFAULT)
    assert not room.ahead(Band.INTERACTIVE)
    room.leave("default")
    assert room.band("batch") is Band.BATCH
    assert not room.ahead(Band.DEFAULT)
