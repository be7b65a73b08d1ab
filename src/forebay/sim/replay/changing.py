"""Scaling of replicas during a replay.

Once a second everything happens that happens in control: gateways' counters and replicas' reports become a reading
(`control.scaling`), the sizer decides on a number, and replicas are ordered or drained, the newest first.
"""

from collections.abc import Sequence
from random import Random
from typing import Final, NamedTuple, Protocol

from forebay.control.scaling.collecting import Collected
from forebay.control.scaling.reading import Look, make_reading
from forebay.control.scaling.starts import Taken, cold_start_s, with_start
from forebay.core.cluster import Slo
from forebay.core.model import LoadReport, ReplicaState
from forebay.core.pressure import TrafficCounters, difference, sum_over_gateways
from forebay.core.reconcile import SlotState, State, UnitKey
from forebay.core.scaling.values import Reading
from forebay.gateway.pressure.counting import pressure
from forebay.obs.clock import wall_s
from forebay.sim.fleet.values import Sizer
from forebay.sim.replay.gateways import MODEL, REVISION, Gate
from forebay.sim.replay.node import Node
from forebay.sim.replay.outcome import Outcome, Size

LOOK_S: Final = 1.0
"""Interval of scaling decisions, as in the product."""
SPREAD: Final = 0.15
"""Sigma of log-normal start times: one in ten takes 1.2 times the median."""
COMING: Final = SlotState(f"{MODEL}-0", 0.0, ReplicaState.STARTING)
"""The slot state of a starting replica, for readings."""


class Sizing(NamedTuple):
    """The sizer, and the start times of replicas."""

    begin: int
    """Ready replicas at the beginning."""
    sizer: Sizer | None = None
    """None: constant size."""
    start_s: float = 0.0
    """Median start time."""
    on_demand: bool = False
    """Whether it may scale to zero."""


class House(Protocol):
    """The host of the replicas."""

    def join(self, at: int) -> Node:
        """Add replica number `at`; gateways may send requests there."""

    def spare(self, node: Node) -> None:
        """Gateways send it no more requests."""

    def part(self, node: Node) -> None:
        """Remove a replica."""


class _Member:
    """A replica that is ready or draining."""

    __slots__ = ("busy_s", "node", "ordered_at", "ready_at", "slot")

    def __init__(self, node: Node, at: int, ordered_at: float, ready_at: float) -> None:
        self.node = node
        self.ordered_at = ordered_at
        self.ready_at = ready_at
        self.busy_s = 0.0
        """Its busy time at the last reading."""
        self.slot = SlotState(f"{MODEL}-{at}", ready_at, ReplicaState.READY, generation=1)


class _Start(NamedTuple):
    """A starting replica."""

    ordered_at: float
    takes_s: float

    @property
    def ready_at(self) -> float:
        return self.ordered_at + self.takes_s


class Changing:
    """The replicas of one replay, beginning with `begin`, each with `gpus`; `slo` is the objective they are sized
    for."""

    def __init__(self, sizing: Sizing, slo: Slo, house: House, rng: Random, gpus: int) -> None:
        self._sizer = sizing.sizer
        self._start_s = sizing.start_s
        self._slo = slo
        self._house = house
        self._rng = rng
        self._gpus = gpus
        self._wanted = sizing.begin
        self._count = sizing.begin
        """Number of replicas so far."""
        self._ready = [_Member(house.join(at), at, 0.0, 0.0) for at in range(sizing.begin)]
        self._coming: list[_Start] = []
        self._going: list[_Member] = []
        self._before: list[TrafficCounters] = []
        """By gateway, its counters at the last reading."""
        self._looked_at = 0.0
        self._started = 0
        self._replica_s = self._ready_s = 0.0
        self._sizes: list[Size] = []
        self._taken: Taken = with_start({}, REVISION, sizing.start_s) if sizing.begin else {}
        self._note(0.0)

    def look(self, now: float, gates: Sequence[Gate]) -> None:
        """Update starting and draining replicas, then let the sizer decide."""
        self._arrive(now)
        self._depart(now)
        reading = self._reading(now, gates)
        if self._sizer is not None:
            wanted = self._sizer.size(reading, now, self._wanted)
            for _ in range(wanted - self._wanted):
                self._coming.append(_Start(now, self._start_s * self._rng.lognormvariate(0.0, SPREAD)))
                self._started += 1
            for _ in range(self._wanted - wanted):
                self._dismiss(now)
            self._wanted = wanted
        self._note(now)

    def close(self, now: float, outcome: Outcome) -> None:
        """End; records the numbers of replicas in `outcome`."""
        for start in self._coming:
            self._replica_s += now - start.ordered_at
        for member in (*self._ready, *self._going):
            self._leave(member, now)
        outcome.sizes, outcome.started = self._sizes, self._started
        outcome.replica_s, outcome.ready_s = self._replica_s, self._ready_s

    # --- replicas

    def _arrive(self, now: float) -> None:
        due = [start for start in self._coming if start.ready_at <= now]
        for start in due:
            self._coming.remove(start)
            at, self._count = self._count, self._count + 1
            self._ready.append(_Member(self._house.join(at), at, start.ordered_at, now))
            self._taken = with_start(self._taken, REVISION, start.takes_s)

    def _depart(self, now: float) -> None:
        for member in [each for each in self._going if each.node.idle]:
            self._going.remove(member)
            self._leave(member, now)
            self._house.part(member.node)

    def _dismiss(self, now: float) -> None:
        """Remove one: the newest starting one, else the newest ready one."""
        if self._coming:
            self._replica_s += now - self._coming.pop().ordered_at
            return
        member = self._ready.pop()
        self._house.spare(member.node)
        self._going.append(member)

    def _leave(self, member: _Member, now: float) -> None:
        self._replica_s += now - member.ordered_at
        self._ready_s += now - member.ready_at

    def _note(self, now: float) -> None:
        ready, sizes = len(self._ready), self._sizes
        size = Size(now, self._wanted, ready, ready + len(self._coming) + len(self._going))
        if not sizes or sizes[-1][1:] != size[1:]:
            sizes.append(size)

    # --- what is seen

    def _reading(self, now: float, gates: Sequence[Gate]) -> Reading | None:
        reports: dict[UnitKey, LoadReport] = {}
        busy_s = 0.0
        for member in self._ready:
            reports[member.slot.id, 1] = member.node.report(MODEL, REVISION)
            before, member.busy_s = member.busy_s, member.node.engine.busy_s
            busy_s += member.busy_s - before
        since_s, self._looked_at = now - self._looked_at, now
        slots = (*(member.slot for member in self._ready), *[COMING] * len(self._coming))
        duty = min(1.0, busy_s / (since_s * len(reports))) if reports else None
        look = Look(State(slots), (), reports, duty={MODEL: duty})
        found = self._collected(gates, since_s)
        start_s = cold_start_s(self._taken, REVISION)
        return make_reading(MODEL, self._slo, found, look, at=wall_s(), cold_start_s=start_s, gpus=self._gpus)

    def _collected(self, gates: Sequence[Gate], since_s: float) -> Collected:
        seen = [pressure(gate.scheduler, gate.metrics).models[MODEL] for gate in gates]
        before = self._before or [TrafficCounters()] * len(seen)
        self._before = seen
        grown = [difference(earlier, each) for earlier, each in zip(before, seen, strict=True)]
        return Collected(since_s, {MODEL: sum_over_gateways(grown)})
