"""Judges response quality during rollouts, apart from the reconcile loop, which only sets targets and fetches
results."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final

from forebay.control.quality.client import ModelClient, ReplicaTarget
from forebay.control.quality.golden import Party, ask_both, golden_round, read_golden
from forebay.control.quality.pairs import by_itself, compared
from forebay.core.deploy.rollout import Rollout
from forebay.core.deploy.samples import Pair
from forebay.core.deploy.scoring import Case
from forebay.core.deploy.settings import GoldenSettings, RolloutSettings
from forebay.core.rollout import Observation
from forebay.obs.clock import random_hex

PAIRS_MAX: Final = 256
"""Pairs that wait for comparing models, the latest ones: which are dropped does not depend on their content."""
PAIRS_AT_ONCE_MAX: Final = 2
FOUND_MAX: Final = 10_000
"""Observations of one rollout that have not been fetched."""
PAUSE_S: Final = 1.0
"""The pause after an error, and while a revision has no ready replica."""
SEED_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Aim:
    """A rollout in its comparison, and the replicas to use; None: none is ready."""

    rollout: Rollout
    settings: RolloutSettings
    stable_url: str | None
    """The address of one ready replica of the stable revision, such as `http://127.0.0.1:8100`."""
    canary_url: str | None
    judge: ReplicaTarget | None = None
    """A ready replica of the model that `settings.judge` names."""
    similarity: ReplicaTarget | None = None

    @property
    def party(self) -> Party | None:
        """Both revisions, once each has a ready replica."""
        if self.stable_url is None or self.canary_url is None:
            return None
        model = self.rollout.model
        return Party(
            ReplicaTarget(self.stable_url, model), ReplicaTarget(self.canary_url, model), self.judge, self.similarity
        )


class Quality:
    """Runs in tasks of its own. No error stops it; `note(kind, text)` gets problems."""

    def __init__(self, client: ModelClient, *, note: Callable[[str, str], None]) -> None:
        self._client = client
        self._note = note
        self._aims: dict[str, Aim] = {}
        self._found: dict[str, deque[Observation]] = {}
        self._pairs: deque[Pair] = deque(maxlen=PAIRS_MAX)
        self._aimed = asyncio.Event()
        self._paired = asyncio.Event()
        self._told = ""

    def aim(self, aims: Iterable[Aim]) -> None:
        """Set the rollouts being compared; work on others stops, and their results are dropped."""
        self._aims = {aim.rollout.id: aim for aim in aims}
        self._found = {id: found for id, found in self._found.items() if id in self._aims}
        self._aimed.set()

    def take(self, pairs: Iterable[Pair]) -> None:
        """Process pairs of responses to mirrored requests."""
        for pair in pairs:
            aim = self._aims.get(pair.rollout)
            if aim is None:
                continue
            self._keep(pair.rollout, [by_itself(pair)])
            if pair.alike is None and (aim.judge or aim.similarity):
                self._pairs.append(pair)
                self._paired.set()

    def drain(self, rollout_id: str) -> list[Observation]:
        """The observations of a rollout since the last call."""
        return list(self._found.pop(rollout_id, ()))

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(PAIRS_AT_ONCE_MAX):
                tasks.create_task(self._safely(self._compare))
            asking: dict[str, asyncio.Task[None]] = {}
            while True:
                self._aimed.clear()
                wanted = {id: aim.settings.golden for id, aim in sorted(self._aims.items()) if aim.settings.golden}
                for id in sorted(asking.keys() - wanted.keys()):
                    asking.pop(id).cancel()
                for id, settings in wanted.items():
                    if id not in asking:
                        asking[id] = tasks.create_task(self._safely(partial(self._ask, id, settings)))
                await self._aimed.wait()

    async def _ask(self, id: str, settings: GoldenSettings) -> None:
        """Run rounds of a rollout's golden set, as read at the start, for as long as the rollout is compared."""
        golden = await asyncio.to_thread(read_golden, settings)  # checking thousands of schemas takes seconds
        if golden.problems:
            self._tell(f"{settings.file}: {golden.problems[0]}")
            return
        rng = Random(random_hex(SEED_BYTES))  # noqa: S311 - it draws cases; no secret depends on it
        loop = asyncio.get_running_loop()

        async def ask(case: Case) -> None:
            """Uses the replicas ready by now; results count at once."""
            party = self._party(id)
            if party is not None:
                self._keep(id, await ask_both(self._client, party, case, settings.timeout_s))

        while True:
            began = loop.time()
            if self._party(id) is None:
                await asyncio.sleep(PAUSE_S)
                continue
            await golden_round(ask, settings, golden.cases, rng)
            await asyncio.sleep(max(0.0, began + settings.every_s - loop.time()))

    def _party(self, id: str) -> Party | None:
        aim = self._aims.get(id)
        return None if aim is None else aim.party

    async def _compare(self) -> None:
        while True:
            while self._pairs:
                pair = self._pairs.popleft()
                aim = self._aims.get(pair.rollout)
                if aim is not None:
                    self._keep(pair.rollout, await compared(self._client, pair, aim.judge, aim.similarity))
            self._paired.clear()
            await self._paired.wait()

    def _keep(self, id: str, found: Iterable[Observation]) -> None:
        if id in self._aims:
            self._found.setdefault(id, deque(maxlen=FOUND_MAX)).extend(found)

    async def _safely(self, work: Callable[[], Awaitable[None]]) -> None:
        """Repeat until the work succeeds. Errors cost the rollout some evidence and affect nothing else."""
        while True:
            try:
                return await work()
            except Exception as mistake:  # supervisor: control goes on without
                self._tell(f"{type(mistake).__name__}: {mistake}")
                await asyncio.sleep(PAUSE_S)

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._note("trouble", f"quality: {text}")
        self._told = text
