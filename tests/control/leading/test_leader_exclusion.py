"""Controls with drifting clocks, each paused between any two steps: at most one leads, and epochs stay in order.

At most one believes in its lease while clocks stay within the drift bound. Actions and writes are in epoch order
whatever the clocks do: nothing of an older epoch follows something of a newer one.
"""

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, event

from forebay.control.leading.candidate import Candidate
from forebay.control.leading.term import Term
from forebay.core.leading.lease import DRIFT_MAX
from forebay.providers.fencing import Fenced
from forebay.store.database import Store, StoreDown, open_store
from forebay.store.leadership import Deposed, Leadership

T = TypeVar("T")
LEASE_S = 8.0
NUMBERS = itertools.count()
NOTHING: Mapping[int, float] = {}


class Action(Enum):
    """What a control does next while it leads."""

    RENEW = auto()
    ACT = auto()
    WRITE = auto()


class Pause:
    """Where the others may go on, for any time."""

    def __await__(self) -> Generator[None, None, None]:
        yield


async def run(work: Callable[[], T]) -> T:
    """What is asked of the store takes time on its way there and on its way back."""
    await Pause()
    found = work()
    await Pause()
    return found


class World:
    """The time, the store, and what has been done."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.name = str(next(NUMBERS))
        self.epochs = folder / self.name
        self.time = 0.0
        self.leapt = 0.0
        self.down = False
        self.done: list[int] = []
        self.written: list[int] = []

    def opened(self) -> Store:
        if self.down:
            raise StoreDown("it does not answer")
        return self.store


class Clocked(Leadership):
    """The lease, by the clock of the world."""

    world: World

    def now(self, connection: Connection) -> float:
        return self.world.time + self.world.leapt


class Control:
    """One control: its clock, and a life that is stepped through."""

    def __init__(self, world: World, name: str, rate: float) -> None:
        self.world = world
        self.rate = rate
        self.term: Term | None = None
        leadership = Clocked(world.opened, world.name, name, "", LEASE_S)
        leadership.world = world
        self._candidate = Candidate(leadership, world.epochs, "", lambda kind, why: None)
        self.action = Action.RENEW
        self._life: Generator[Any, None, None] = self._live().__await__()

    def now(self) -> float:
        return self.world.time * self.rate

    @property
    def believes(self) -> bool:
        return self.term is not None and not self.term.why_not()

    def step(self) -> None:
        next(self._life)

    def end(self) -> None:
        self._life.close()

    async def _live(self) -> None:
        while True:
            self.term = await self._candidate.attempt(run, self.now)
            if self.term is None:
                await Pause()
                continue
            while not self.term.over:
                match self.action:
                    case Action.RENEW:
                        await self.term.renew(run)
                    case Action.ACT:
                        await self._act(self.term)
                    case Action.WRITE:
                        await self._write(self.term)
                await Pause()

    async def _act(self, term: Term) -> None:
        if term.why_not():
            return
        await Pause()
        with suppress(Fenced):
            term.fence.check()
            self.world.done.append(term.epoch)

    async def _write(self, term: Term) -> None:
        if term.why_not():
            return
        await Pause()
        with suppress(Deposed), term.guard(self.world.store).write():
            self.world.written.append(term.epoch)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{tmp_path_factory.mktemp('turns')}/a.db")
    # Nothing here is to outlive the test, so no disk has to be waited for.
    event.listen(opened._engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF"))
    opened._engine.dispose()
    yield opened
    opened.close()


class Turn(NamedTuple):
    """After `after_s` seconds, one control runs `steps` steps with this action."""

    who: int
    after_s: float
    steps: int
    action: Action
    down: bool


TURNS = st.lists(
    st.builds(
        Turn,
        st.integers(0, 2),
        st.sampled_from([0.0, 0.5, 2.0, 6.0, 6.5, 7.0, 7.5, 8.1, 9.0, 30.0]),
        st.integers(1, 7),
        st.sampled_from(Action),
        st.booleans().flatmap(lambda rare: st.booleans() if rare else st.just(False)),
    ),
    min_size=5,
    max_size=25,
)
RATES = st.lists(st.floats(1 - DRIFT_MAX, 1.3), min_size=3, max_size=3)


def live(
    store: Store, folder: Path, rates: list[float], turns: Sequence[Turn], leaps: Mapping[int, float] = NOTHING
) -> World:
    """Controls with clocks of these rates go through these turns; before some of them the database's clock leaps."""
    world = World(store, folder)
    controls = [Control(world, f"c{number}", rate) for number, rate in enumerate(rates)]
    try:
        for number, turn in enumerate(turns):
            world.time += turn.after_s
            world.leapt += leaps.get(number, 0.0)
            world.down = turn.down
            controls[turn.who].action = turn.action
            for _ in range(turn.steps):
                controls[turn.who].step()
                assert leaps or sum(control.believes for control in controls) <= 1
    finally:
        for control in controls:
            control.end()
    assert world.done == sorted(world.done)
    assert world.written == sorted(world.written)
    return world


QUICK = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUICK
@given(RATES, TURNS)
def test_at_most_one_leader_and_actions_in_epoch_order(
    store: Store, tmp_path: Path, rates: list[float], turns: list[Turn]
) -> None:
    live(store, tmp_path, rates, turns)


@QUICK
@given(
    st.lists(st.floats(0.1, 3.0), min_size=3, max_size=3),
    TURNS,
    st.dictionaries(st.integers(0, 24), st.floats(-60, 60), min_size=1),
)
def test_actions_stay_in_epoch_order_with_arbitrary_clocks(
    store: Store, tmp_path: Path, rates: list[float], turns: list[Turn], leaps: dict[int, float]
) -> None:
    live(store, tmp_path, rates, turns, leaps)


@pytest.mark.slow
@settings(QUICK, max_examples=500)
@given(RATES, TURNS)
def test_at_most_one_leader_over_many_examples(
    store: Store, tmp_path: Path, rates: list[float], turns: list[Turn]
) -> None:
    live(store, tmp_path, rates, turns)


def turn(who: int, after_s: float, steps: int, action: Action) -> Turn:
    return Turn(who, after_s, steps, action, down=False)


def test_leader_paused_before_acting_is_fenced_when_it_resumes(store: Store, tmp_path: Path) -> None:
    for action in (Action.ACT, Action.WRITE):
        turns = [turn(0, 0.0, 5, action), turn(1, 9.0, 9, action), turn(0, 0.0, 3, action), turn(2, 9.0, 9, action)]
        world = live(store, tmp_path, [1.0, 0.9, 1.1], turns)
        assert sorted({*world.done, *world.written}) == [1, 2, 3]


def test_lease_of_the_slowest_allowed_clock_is_not_prolonged_by_rounding(store: Store, tmp_path: Path) -> None:
    turns = [turn(1, 6.0, 1, Action.RENEW), turn(1, 7.5, 4, Action.RENEW), turn(0, LEASE_S, 3, Action.RENEW)]
    live(store, tmp_path, [1.0, 1 - DRIFT_MAX, 1.0], turns)


def test_lease_tolerates_the_slowest_allowed_clock(store: Store, tmp_path: Path) -> None:
    slow, quick = 1 - DRIFT_MAX, 1.0
    turns = [turn(0, 0.0, 3, Action.RENEW), turn(1, LEASE_S + 0.1, 9, Action.ACT), turn(0, 0.0, 3, Action.ACT)]
    assert set(live(store, tmp_path, [slow, quick, quick], turns).done) == {2}
