"""One seed: a cluster, its clients and its faults, and whether all invariants held."""

import asyncio
import io
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from forebay.obs import log as logs
from forebay.obs.clock import standing_in
from forebay.sim.full.event_log import EventLog
from forebay.sim.full.gateways import watched
from forebay.sim.full.machine import in_place_of_the_system
from forebay.sim.full.profile import Profile, draw
from forebay.sim.full.world import World
from forebay.sim.loop import EPOCH_S, run
from forebay.sim.network.network import Network

SECONDS_MAX: Final = 600.0
"""Limit of a run in virtual time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a seed. `digest` is the same in every run."""

    seed: int
    profile: Profile
    violations: tuple[str, ...]
    counts: dict[str, int]
    """Events by kind."""
    endings: dict[str, int]
    """Endings of requests, as clients saw them."""
    digest: str
    tail: tuple[str, ...]
    """The last events."""

    @property
    def ok(self) -> bool:
        """Whether every invariant held."""
        return not self.violations

    @property
    def lines(self) -> tuple[str, ...]:
        """A readable summary: the profile, the events, and the result."""
        happened = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        ended = ", ".join(f"{count} {ending}" for ending, count in sorted(self.endings.items()))
        told = (f"seed {self.seed}: {self.profile}", f"requests: {ended}", f"events: {happened}")
        if self.ok:
            return (*told, f"all invariants held; digest {self.digest[:16]}")
        return (*told, *(f"VIOLATED at {violation}" for violation in self.violations), f"replay: {self.command}")

    @property
    def command(self) -> str:
        """The command that replays it."""
        return f"forebay simulate --seed {self.seed} --depth full"


def chaos(seed: int, *, faults: bool = True, profile: Profile | None = None, tail_max: int = 40) -> Verdict:
    """Run a seed. The result is deterministic in every process.

    `profile`: overrides the seed's own. `tail_max`: number of last events to keep.
    """
    rng = Random(f"profile {seed}")  # noqa: S311 - chance that can be repeated
    one = _Run(seed, profile or draw(rng, faults=faults), EventLog(tail_max=tail_max))
    with tempfile.TemporaryDirectory(prefix="forebay-sim-") as folder:
        try:
            run(one.main(Path(folder)), seconds_max=SECONDS_MAX, network=one.network, seed=seed)
        except Exception as error:
            for each in error.exceptions if isinstance(error, ExceptionGroup) else [error]:
                one.event_log.violated("no unexpected exception", f"{each!r}{_where(each)}")
    return one.verdict()


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace is not None else ""


class _Run:
    """A world, with its clock and random numbers."""

    def __init__(self, seed: int, profile: Profile, event_log: EventLog) -> None:
        self.seed = seed
        self.profile = profile
        self.event_log = event_log
        self.network = Network(Random(f"network {seed}"), chop=profile.chop)  # noqa: S311
        self.endings: Counter[str] = Counter()

    async def main(self, folder: Path) -> None:
        """Run from start to end."""
        loop, event_log = asyncio.get_running_loop(), self.event_log
        event_log.now = loop.time
        log = logs.configure(io.StringIO())
        ids = Random(f"ids {self.seed}")  # noqa: S311 - reproducible
        async with asyncio.TaskGroup() as group:
            with watched(event_log, log) as gateways:
                world = World(
                    self.profile,
                    self.seed,
                    network=self.network,
                    group=group,
                    folder=folder,
                    event_log=event_log,
                    gateways=gateways,
                    log=log,
                )
                with (
                    in_place_of_the_system(world.machine),
                    standing_in(
                        lambda: EPOCH_S + loop.time() + world.wall_ahead_s, lambda size: ids.randbytes(size).hex()
                    ),
                ):
                    await world.run()
                    self.endings.update(asked.ending.value for asked in world.asked)
                    await world.end()

    def verdict(self) -> Verdict:
        """The result."""
        event_log = self.event_log
        return Verdict(
            seed=self.seed,
            profile=self.profile,
            violations=tuple(event_log.violations),
            counts=dict(event_log.counts),
            endings=dict(self.endings),
            digest=event_log.digest,
            tail=tuple(event_log.tail),
        )
