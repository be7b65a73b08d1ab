"""Control is killed after every action and every write in turn: the rollout still ends the same way."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.control.deploying.rig import Rig, play, started
from tests.control.deploying.world import NEW, OLD, READY, World, wait

from forebay.control.deploying import RolloutRequest
from forebay.core.deploy.course import Course, Kind
from forebay.core.deploy.rollout import ENDED, Phase
from forebay.core.rollout.planning import Step
from forebay.store import events
from forebay.store.rollouts import Rollouts, replay

STEPS = (Step(0.34, 20.0), Step(0.67, 20.0))
COURSES = {
    "canary": Course(Kind.CANARY, STEPS, start_timeout_s=60.0, warm_up_s=1.0, settle_s=4.0),
    "blue-green": Course(Kind.BLUE_GREEN, (), start_timeout_s=60.0, warm_up_s=1.0, settle_s=4.0),
    "ab": Course(Kind.AB, (Step(0.5, 20.0),), start_timeout_s=60.0, warm_up_s=1.0),
}
EASY = {
    "errors": {"ratio": 4, "floor": 0.3},
    **{name: {"required": False} for name in ("ttft", "tpot", "latency", "length")},
}
KILLS_MAX = 200


class Story:
    """One rollout, whatever happens to control; what must hold is looked at after every step."""

    def __init__(self, world: World, course: Course, kill_at: tuple[str, int]) -> None:
        self.world, self.course, self.kill_at = world, course, kill_at
        self.counts = {"action": 0, "write": 0}
        self.rig: Rig | None = None
        self.up = False
        world.requests_per_s = 40.0
        world.acted, world.store.written = self.counter("action"), self.counter("write")

    def counter(self, kind: str) -> Callable[[], None]:
        def count() -> None:
            self.look()
            self.counts[kind] += 1
            if (kind, self.counts[kind]) == self.kill_at and self.rig is not None:
                self.rig.task.cancel()
                raise asyncio.CancelledError

        return count

    def look(self) -> None:
        """Never fewer ready replicas than wanted, never a share that no ready replicas carry."""
        world = self.world
        if not world.places.snapshot.exists():
            return
        alive = {(unit.slot, unit.generation) for unit in world.provider.alive()}
        routed = [r for r in world.routes.replicas if r.state is READY]
        real = [r for r in routed if (r.id, r.generation) in alive]
        self.up = self.up or len(real) >= world.replicas
        if self.up:
            assert len(real) == len(routed), "a replica that is gone is routed to"
            assert len(real) >= world.replicas, "the floor"
        split = world.routes.split
        if split is not None and split.share:
            ready = world.ready(split.canary)
            assert ready >= split.share * world.replicas - 1e-6 or ready >= 1 >= split.share * world.replicas

    async def play(self) -> None:
        plan = self.world.plan(rollout=EASY)
        for _ in range(3):
            self.rig = await started(self.world, plan)
            await self.live(self.rig)
            await self.rig.kill()
            if self.over(self.rig):
                return

    def over(self, rig: Rig) -> bool:
        rows = rig.deployments.standing("chat")
        return bool(rows) and rows[0].rollout.phase in ENDED and rig.world.alive() == self.end(rows[0].rollout.phase)

    def end(self, phase: Phase) -> dict[str, str]:
        if phase is Phase.PROMOTED:
            return {"chat-4": NEW, "chat-5": NEW, "chat-6": NEW}
        return {"chat-0": OLD, "chat-1": OLD, "chat-2": OLD}

    async def live(self, rig: Rig) -> None:
        for _ in range(4000):
            await wait(0.05)
            self.look()
            if rig.task.done() or self.over(rig):
                return
            if not rig.deployments.standing("chat") and self.up:
                try:
                    await rig.deployments.deploy(RolloutRequest("chat", "new", self.course), "ann")
                except asyncio.CancelledError:
                    return
        events = [f"{e.at % 1e5:.1f} {e.kind} {e.unit} {e.why}" for e in self.world.journal]
        raise AssertionError("\n".join(["it never ended", *events]))


def check_end(world: World, phase: Phase) -> None:
    """The store, the history and the replicas agree."""
    known = Rollouts(lambda: world.store, "test").known()
    with world.store.read() as connection:
        assert events.verify(connection) is None
        targets, rollouts = replay(events.since(connection))
    assert targets == {target.model: target for target in known.targets}
    [row] = known.rollouts
    assert rollouts == {row.rollout.id: (row.rollout, row.held)}
    assert row.rollout.phase is phase
    assert [target.revision for target in known.targets] == ([NEW] if phase is Phase.PROMOTED else [])
    assert world.routes.split is None
    assert {r.revision for r in world.routes.replicas} == set(world.alive().values())


def run_story(folder: Path, name: str, kill_at: tuple[str, int] = ("never", 0)) -> dict[str, int]:
    counts: dict[str, int] = {}

    async def test(world: World) -> None:
        story = Story(world, COURSES[name], kill_at)
        await story.play()
        check_end(world, Phase.JUDGED if name == "ab" else Phase.PROMOTED)
        counts.update(story.counts)

    folder.mkdir(exist_ok=True)
    play(folder, test)
    return counts


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "canary" else pytest.mark.slow) for name in sorted(COURSES)]
)
def test_rollout_completes_without_kills(tmp_path: Path, name: str) -> None:
    counts = run_story(tmp_path, name)
    assert counts["action"] > 5
    assert counts["write"] > 3


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(COURSES))
def test_ended_rollout_causes_no_further_actions(tmp_path: Path, name: str) -> None:
    async def test(world: World) -> None:
        story = Story(world, COURSES[name], ("never", 0))
        await story.play()
        plan = world.plan(rollout=EASY)
        for _ in range(2):
            before = dict(story.counts), world.snapshot().version
            rig = await started(world, plan)
            await wait(60.0)
            await rig.kill()
            assert (story.counts, world.snapshot().version) == before

    play(tmp_path, test)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["action", "write"])
@pytest.mark.parametrize("name", sorted(COURSES))
def test_rollout_completes_with_control_killed_at_any_step(tmp_path: Path, name: str, kind: str) -> None:
    number = 1
    while run_story(tmp_path / str(number), name, (kind, number))[kind] >= number:
        number += 1
        assert number < KILLS_MAX
    assert number > 3
