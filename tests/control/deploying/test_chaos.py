"""Random failures of units, control and the store with random commands: in the end all state agrees."""

from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from tests.control.deploying.rig import Rig, play, started
from tests.control.deploying.test_control_kills import COURSES, EASY
from tests.control.deploying.world import World, revision, wait

from forebay.control.deploying import DeployRefused, RolloutRequest
from forebay.control.plan import Plan
from forebay.core.deploy.rollout import ENDED, Command
from forebay.store import events
from forebay.store.database import StoreError
from forebay.store.rollouts import Rollouts, replay

pytestmark = pytest.mark.slow
SEEDS = range(24)
NAMES = ("old", "new", "newer")
PAUSES_S = (0.05, 0.3, 1.0, 3.0, 10.0)
STEPS = (10, 40)


class Chaos:
    """One seed."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.rng = Random(seed)
        self.rig: Rig | None = None

    @property
    def plan(self) -> Plan:
        return self.world.plan(rollout=EASY)

    @property
    def up(self) -> Rig:
        assert self.rig is not None
        assert not self.rig.task.done(), self.rig.task
        return self.rig

    async def start(self) -> None:
        """As an init system would."""
        while self.rig is None or self.rig.task.done():
            try:
                self.rig = await started(self.world, self.plan)
            except StoreError:
                await wait(0.5)

    async def kill_control(self) -> None:
        await self.up.kill()
        await self.start()

    async def kill_unit(self) -> None:
        alive = self.world.provider.alive()
        if alive:
            unit = self.rng.choice(alive)
            self.world.provider.end(unit.slot, unit.generation, "was killed by signal 9 (SIGKILL)")

    async def lose_the_store(self) -> None:
        self.world.store.down = "the server is away"

    async def find_the_store(self) -> None:
        self.world.store.down = ""

    async def lose_an_answer(self) -> None:
        self.world.store.loses_answer = True

    async def deploy(self) -> None:
        wish = RolloutRequest("chat", self.rng.choice(NAMES), self.rng.choice(list(COURSES.values())), unchecked=True)
        with suppress(DeployRefused, StoreError):
            await self.up.deployments.deploy(wish, "ann")

    async def command(self) -> None:
        await self.say(self.rng.choice(list(Command)))

    async def say(self, command: Command) -> None:
        for standing in self.up.deployments.standing("chat"):
            with suppress(DeployRefused, StoreError):
                await self.up.deployments.command(standing.rollout.id, command, "ann", "")

    async def change_the_file(self) -> None:
        before = self.world.declared, self.world.replicas
        if self.rng.random() < 0.5:
            self.world.replicas = self.rng.randint(1, 4)
        else:
            self.world.declared = self.rng.choice(NAMES)
        try:
            if self.up.deployments.problems(self.plan):
                raise DeployRefused("something is rolled out")
            await self.up.deployments.take_over(self.plan)
            self.up.control.take_over(self.plan, None)
        except (DeployRefused, StoreError):
            self.world.declared, self.world.replicas = before

    async def run(self) -> None:
        self.world.requests_per_s = self.rng.choice([0.0, 20.0, 60.0])
        await self.start()
        await self.up.ready()
        deeds = (
            *(self.kill_control, self.kill_unit, self.lose_the_store, self.find_the_store, self.find_the_store),
            *(self.lose_an_answer, self.deploy, self.deploy, self.command, self.change_the_file),
        )
        for _ in range(self.rng.randint(*STEPS)):
            await self.rng.choice(deeds)()
            await wait(self.rng.choice(PAUSES_S))

    async def heal(self) -> None:
        """Nothing fails any more, and somebody wants everything to go on."""
        self.world.store.down, self.world.store.loses_answer = "", False
        self.world.requests_per_s = 60.0
        for _ in range(100):
            await self.say(Command.PROMOTE)
            await wait(10.0)
            if all(standing.rollout.phase in ENDED for standing in self.up.deployments.standing("chat")):
                break
        await wait(60.0)

    def check(self) -> None:
        world = self.world
        rollouts = Rollouts(lambda: world.store, "test")
        targets = {target.model: target for target in rollouts.known().targets}
        wanted = targets["chat"].revision if targets else revision(world.declared)
        assert list(world.alive().values()) == [wanted] * world.replicas
        assert world.ready(wanted) == len(world.routes.replicas) == world.replicas
        assert world.routes.split is None
        with world.store.read() as connection:
            assert events.verify(connection) is None
            told, history = replay(events.since(connection))
        assert told == targets
        for row in rollouts.past():
            rollout, held = history[row.rollout.id]
            assert (rollout.phase, rollout.step, rollout.share, held) == (
                row.rollout.phase,
                row.rollout.step,
                row.rollout.share,
                row.held,
            )
            assert row.ended


@pytest.mark.parametrize("seed", SEEDS)
def test_store_history_and_replicas_converge_after_random_failures(tmp_path: Path, seed: int) -> None:
    async def test(world: World) -> None:
        chaos = Chaos(world, seed)
        await chaos.run()
        await chaos.heal()
        chaos.check()
        placed = dict(world.provider.placed)
        await chaos.kill_control()
        await wait(20.0)
        assert world.provider.placed == placed
        chaos.check()
        await chaos.up.kill()

    play(tmp_path, test)
