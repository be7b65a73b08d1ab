"""An operator who rolls out revisions: retries when control is down, sends random commands, decides held rollouts."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from random import Random
from typing import Final, Protocol

from forebay.control.deploying import Deployments, RolloutRequest, RolloutStanding
from forebay.core.deploy.rollout import ENDED, Command, Phase
from forebay.sim.full.clients import MODEL
from forebay.sim.full.event_log import EventLog
from forebay.sim.full.rollouts.drawing import draw_course, parse

WHO: Final = "ann"
LOOK_S: Final = 0.5
WHIM: Final = 0.04
"""Probability of a random command at each look."""
PATIENCE_S: Final = (4.0, 12.0)
"""Range of the time after which a stalled rollout is decided by hand."""
PAUSE_S: Final = (0.2, 3.0)
"""Range of the pause between rollouts."""


class ControlClient(Protocol):
    """The interface to control."""

    async def ask(
        self, what: Callable[[Deployments], Coroutine[None, None, RolloutStanding]]
    ) -> RolloutStanding | None:
        """Call control; None if it is down, dies meanwhile or refuses."""

    def standing(self, id: str) -> RolloutStanding | None:
        """The state of a rollout; None: currently unknown."""

    def latest(self) -> RolloutStanding | None:
        """The state of the running rollout; None: none, or unknown."""


class Operator:
    """Performs rollouts one after the other. Once `hurried`, starts no more and sends no random commands."""

    def __init__(
        self, rollouts: Mapping[str, str], rng: Random, control_client: ControlClient, event_log: EventLog
    ) -> None:
        self.hurried = False
        self.regrets = False
        """A faulty revision was promoted: requests may fail, too."""
        self.natures = {revision: parse(rollout)[1] for revision, rollout in rollouts.items()}
        """By revision."""
        self._kinds = [parse(rollout)[0] for rollout in rollouts.values()]
        self._rng = rng
        self._control_client = control_client
        self._event_log = event_log
        self._now = asyncio.get_running_loop().time

    async def run(self) -> None:
        """Run until all rollouts have ended."""
        rng = self._rng
        for kind, revision in zip(self._kinds, self.natures, strict=True):
            await asyncio.sleep(rng.uniform(*PAUSE_S))
            wish = RolloutRequest(MODEL, revision, draw_course(kind, rng), "because", unchecked=True)
            id = await self._deploy(wish)
            if id is None:
                return
            ended = await self._attend(id, sound=self.natures[revision] == "sound")
            self._check(ended)

    async def _deploy(self, wish: RolloutRequest) -> str | None:
        """The id of the rollout; None: it is too late to start one."""
        if self.hurried:
            return None
        while True:  # once requested it may have started, whatever the response was
            self._event_log.note("deploy", wish.revision, wish.course.kind)
            standing = (
                await self._control_client.ask(lambda deployments: deployments.deploy(wish, WHO))
                or self._control_client.latest()
            )
            if standing is not None and standing.rollout.canary == wish.revision:
                return standing.rollout.id
            await asyncio.sleep(LOOK_S)

    async def _attend(self, id: str, *, sound: bool) -> RolloutStanding:
        """Watch a rollout until it ends."""
        rng = self._rng
        before, since, patience_s = None, self._now(), rng.uniform(*PATIENCE_S)
        while True:
            await asyncio.sleep(LOOK_S)
            standing = self._control_client.standing(id)
            if standing is None:
                continue
            rollout = standing.rollout
            if rollout.phase in ENDED:
                return standing
            state = rollout.phase, rollout.step, rollout.share, rollout.paused
            if state != before:
                self._event_log.note("rollout", id, *state, rollout.why)
                before, since = state, self._now()
            command = None
            if self._now() - since > patience_s:
                command = Command.RESUME if rollout.paused else Command.PROMOTE if sound else Command.ABORT
                since = self._now()
            elif not self.hurried and rng.random() < WHIM:
                command = rng.choice((Command.PAUSE, Command.RESUME, Command.PROMOTE, Command.ABORT))
                if not sound:
                    command = Command.PAUSE if command is Command.PROMOTE else command
            if command is not None:
                await self._say(id, command)

    async def _say(self, id: str, command: Command) -> None:
        self._event_log.note("command", id, command)
        await self._control_client.ask(lambda deployments: deployments.command(id, command, WHO, "because"))

    def _check(self, standing: RolloutStanding) -> None:
        """Check that the rollout's ending is a permitted one."""
        rollout = standing.rollout
        nature, kind = self.natures[rollout.canary], rollout.course.kind
        told = f"{rollout.id} {kind} of what is {nature}: {rollout.phase}, {rollout.why}"
        self._event_log.note("rollout", told)
        expect = self._event_log.expect
        expect(
            rollout.phase is not Phase.PROMOTED or rollout.course.takes_over,
            "only plans that take over are promoted",
            told,
        )
        expect(
            rollout.phase is not Phase.JUDGED or not rollout.course.takes_over, "only comparisons end as judged", told
        )
        expect(
            nature not in ("broken", "stuck") or rollout.phase is Phase.ROLLED_BACK,
            "a revision that cannot start is rolled back",
            told,
        )
        self.regrets |= nature in ("failing", "dying") and rollout.phase is Phase.PROMOTED
        bad = nature in ("slow", "failing", "dying") and rollout.course.steps
        expect(not bad or rollout.phase is not Phase.PROMOTED, "no bad revision is promoted", told)
