"""What control does next: desired slots compared with observed units, as one pure function.

A *slot* (`chat-0`, `gateway-0`) holds one unit; a *unit* is one process in it, identified by its generation. Unknown
is not "none": when units could not be observed, nothing is done.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from forebay.core.lifecycle import Event, step
from forebay.core.model import Endpoint, GatewaySpec, LoadReport, ReplicaState, WorkerSpec

UnitKey = tuple[str, int]
"""Slot and generation."""


class Kind(StrEnum):
    """What runs in a slot."""

    REPLICA = "replica"
    GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class Slot:
    """A desired unit. A running unit is up to date if it has the same `digest`; `group` is the model."""

    id: str
    kind: Kind
    group: str
    index: int
    digest: str
    spec: WorkerSpec | GatewaySpec
    listen_timeout_s: float = 60.0
    """Time from the start of the process to its first answered probe."""
    load_timeout_s: float = 360.0
    """Time from then until it is ready."""
    drain_grace_s: float = 30.0
    memory_bytes: int = 0
    """Estimated memory use on its node."""
    device_bytes: int = 0
    """Estimated memory use on each of its devices."""
    waits: str = ""
    """Why nothing can be started here now; empty: it can."""
    launcher: tuple[str, ...] = ()
    """Command prefix (`launcher COMMAND …`); it must exec the unit's command, not fork it."""
    moves: str = ""
    """Why its unit must move elsewhere; empty: it may stay."""


@dataclass(frozen=True, slots=True)
class ObservedUnit:
    """A unit as its provider observes it. `ended` and `last_words` (its last log lines) are for people, set only once
    it is dead."""

    slot: str
    generation: int
    kind: Kind
    digest: str
    drain_grace_s: float
    alive: bool
    pid: int = 0
    endpoint: Endpoint | None = None
    ended: str = ""
    last_words: str = ""
    node: str = ""
    devices: tuple[str, ...] = ()
    cpus: tuple[int, ...] = ()
    memory_bytes: int = 0
    device_bytes: int = 0

    @property
    def key(self) -> UnitKey:
        """Slot and generation."""
        return self.slot, self.generation


@dataclass(frozen=True, slots=True)
class Answered:
    """A unit answered its probe; replicas with a report."""

    report: LoadReport | None = None


@dataclass(frozen=True, slots=True)
class Silent:
    """A unit that should be listening did not answer its probe."""

    why: str


Answer = Answered | Silent


@dataclass(frozen=True, slots=True)
class ClusterObservation:
    """One observation. `units` None: unknown, because of `trouble`. `refused`: slots whose start failed, and why.

    `condemned`: units that cannot continue because of an error of their device, and why.
    """

    units: tuple[ObservedUnit, ...] | None
    answers: Mapping[UnitKey, Answer] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    trouble: str = ""
    condemned: Mapping[UnitKey, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rules:
    """Durations and bounds of the decision."""

    unresponsive_s: float = 10.0
    """A unit that has answered no probe for this long is killed."""
    silent_probes_min: int = 3
    """… and has missed at least this many probes, so that a pause of control itself kills no unit."""
    stable_s: float = 60.0
    """After being ready for this long, a unit's earlier crashes no longer count as consecutive."""
    backoff_max_s: float = 30.0
    starting_max: int = 4
    """Most replicas that may be starting at the same time."""
    grace_s_max: float = math.inf
    """Upper bound of every drain; 0 kills at once."""
    unwanted_why: str = "no longer wanted"
    """Reason given for stopping units whose slot is no longer desired."""
    look_again_s: float = 1.0
    look_again_starting_s: float = 0.2


@dataclass(frozen=True, slots=True)
class UnitState:
    """State of the unit that holds a slot. Times are control's monotonic seconds."""

    generation: int
    born: float
    answered: bool = False
    ready_since: float | None = None
    silent_since: float | None = None
    silent_probes: int = 0


@dataclass(frozen=True, slots=True)
class Leaving:
    """A unit that was told to stop and is killed at `by`."""

    generation: int
    by: float
    why: str
    stays: bool = False
    """It is told to stop only once its successor answers: it is the only gateway."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """State of a slot."""

    id: str
    since: float
    state: ReplicaState = ReplicaState.STOPPED
    why: str = ""
    generation: int = 0
    unit: UnitState | None = None
    leaving: tuple[Leaving, ...] = ()
    restarts: int = 0
    failures: int = 0
    """Consecutive failures, without a stable period between them."""
    not_before: float = 0.0
    last_words: str = ""


@dataclass(frozen=True, slots=True)
class State:
    """Control's state, rebuilt from observation after a restart. Sorted by id."""

    slots: tuple[SlotState, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Start a unit."""

    slot: Slot
    generation: int
    why: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Stop a unit: `grace_s` above 0 lets it drain, 0 kills it and removes its record."""

    slot: str
    generation: int
    grace_s: float
    why: str


Action = Place | Remove


@dataclass(frozen=True, slots=True)
class Move:
    """A state transition of a slot; `last_words` are the last log lines of the unit that ended."""

    slot: str
    generation: int
    before: ReplicaState
    after: ReplicaState
    event: Event
    why: str
    last_words: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do, what happened, and when to look again. `why`: what blocks all progress, if anything."""

    actions: tuple[Action, ...]
    moves: tuple[Move, ...]
    look_again_s: float
    why: str = ""


def decide(
    wanted: Iterable[Slot], state: State, seen: ClusterObservation, now: float, rules: Rules
) -> tuple[State, Verdict]:
    """Compare the desired slots with the observation. Repeated execution of the actions converges to no actions."""
    if seen.units is None:
        why = f"the running units are unknown, so nothing is changed: {seen.trouble}"
        return state, Verdict((), (), rules.look_again_s, why)
    decision = _Decision(
        slots={slot.id: slot for slot in wanted},
        units={unit.key: unit for unit in seen.units},
        states={s.id: s for s in state.slots},
        seen=seen,
        now=now,
        rules=rules,
    )
    for id in sorted({*decision.slots, *decision.states, *(unit.slot for unit in seen.units)}):
        decision.states[id] = decision.observe(decision.states.get(id, SlotState(id, now)))
    decision.retire()
    places = decision.place()
    removes = decision.remove()
    kept = tuple(s for _, s in sorted(decision.states.items()) if s.id in decision.slots or s.leaving or s.unit)
    return State(kept), Verdict((*removes, *places), tuple(decision.moves), decision.look_again_s(kept))


def needs_spare(slots: Sequence[Slot], spare: Slot, state: State, units: Iterable[ObservedUnit]) -> bool:
    """Whether one extra replica (surge) serves while those of `slots`, a model's, are replaced one after the other.

    It starts before the first one leaves and stops when the last one is ready, so that capacity never drops. A single
    replica gets no spare, as there may be no room for two, unless it moves to another node: then the placement of
    `spare` has shown that there is room.
    """
    leaving = {(s.id, x.generation) for s in state.slots for x in s.leaving}
    running = {unit.slot: unit for unit in units if unit.alive and unit.key not in leaving}
    stands = spare.id in running
    outdated = [(slot, running[slot.id]) for slot in slots if slot.id in running]
    outdated = [(slot, unit) for slot, unit in outdated if unit.digest != slot.digest]
    if outdated:
        return stands or len(slots) > 1 or any(_moves(slot, unit) for slot, unit in outdated)
    states = {s.id: s.state for s in state.slots}
    return stands and any(states.get(slot.id) is not ReplicaState.READY for slot in slots if not slot.waits)


def _moves(slot: Slot, unit: ObservedUnit) -> bool:
    node = slot.spec.node if isinstance(slot.spec, WorkerSpec) else ""
    return bool(unit.node) and bool(node) and unit.node != node


@dataclass
class _Decision:
    """Working state of one decision: the inputs, and the new state of the slots."""

    slots: dict[str, Slot]
    units: dict[UnitKey, ObservedUnit]
    states: dict[str, SlotState]
    seen: ClusterObservation
    now: float
    rules: Rules
    moves: list[Move] = field(default_factory=list)

    def move(self, s: SlotState, event: Event, why: str) -> SlotState:
        after = step(s.state, event)
        if after is s.state:
            return replace(s, why=why)
        words = s.last_words if event in (Event.DIED, Event.HELD_BACK) else ""
        self.moves.append(Move(s.id, s.generation, s.state, after, event, why, words))
        return replace(s, state=after, since=self.now, why=why)

    def observe(self, s: SlotState) -> SlotState:
        """Apply the observation of one slot."""
        own = {g: unit for (id, g), unit in self.units.items() if id == s.id}
        live = {g: unit for g, unit in own.items() if unit.alive}
        latest = self.now + self.rules.grace_s_max
        leaving = tuple(replace(x, by=min(x.by, latest)) for x in s.leaving if x.generation in live)
        s = replace(s, generation=max([s.generation, *own]), leaving=leaving)
        if s.unit and s.unit.generation not in live:
            s = self.died(s, own.get(s.unit.generation))
        if not s.unit and not s.leaving and s.state is ReplicaState.DRAINING:
            killed = own.get(s.generation) if s.failures else None
            s = self.emptied(replace(s, last_words=killed.last_words) if killed else s, s.why)
        s = self.adopt(s, {g: unit for g, unit in live.items() if g not in {x.generation for x in s.leaving}})
        if s.unit:
            s = self.apply_answer(s, s.unit, self.seen.answers.get((s.id, s.unit.generation)))
        if s.unit and (s.id, s.unit.generation) in self.seen.condemned:
            s = self.kill(s, s.unit, self.seen.condemned[s.id, s.unit.generation])
        if s.unit and s.id in self.slots:
            s = self.enforce_timeouts(s, s.unit, self.slots[s.id])
        return self.stop_replaced(s, live)

    def stop_replaced(self, s: SlotState, live: Mapping[int, ObservedUnit]) -> SlotState:
        """Stop the units that waited for a successor, once it answers or if none is desired any more."""
        if s.id in self.slots and not (s.unit and s.unit.answered):
            return s
        leaving = tuple(
            replace(x, by=self.deadline(live[x.generation].drain_grace_s), stays=False) if x.stays else x
            for x in s.leaving
        )
        return replace(s, leaving=leaving)

    def deadline(self, grace_s: float) -> float:
        """When a unit that is told to stop now is killed."""
        return self.now + min(grace_s, self.rules.grace_s_max)

    def adopt(self, s: SlotState, staying: Mapping[int, ObservedUnit]) -> SlotState:
        """The newest unit that was not told to stop holds the slot; older ones are stopped."""
        newest = max(staying, default=0)
        if newest and (not s.unit or s.unit.generation < newest):
            s = replace(s, unit=UnitState(newest, self.now))
            if s.state is not ReplicaState.STOPPED:
                s = self.move(s, Event.DIED, f"generation {newest} is running too")
            s = self.move(s, Event.ADOPTED, f"the running process {staying[newest].pid}")
        for generation, unit in sorted(staying.items()):
            if s.unit and generation < s.unit.generation:
                by, stays = self.deadline(unit.drain_grace_s), unit.kind is Kind.GATEWAY
                left = Leaving(generation, by, f"generation {newest} is running too", stays)
                s = replace(s, leaving=(*s.leaving, left))
        return s

    def emptied(self, s: SlotState, why: str) -> SlotState:
        """A slot has lost its unit; it is quarantined while its back-off lasts."""
        if s.not_before > self.now:
            why = f"{why}; {s.failures} failures in a row, starts again in {s.not_before - self.now:.0f} s"
            return self.move(s, Event.HELD_BACK, why)
        return self.move(s, Event.DIED, why)

    def died(self, s: SlotState, unit: ObservedUnit | None) -> SlotState:
        """The unit of a slot ended on its own."""
        refused = self.seen.refused.get(s.id, "")
        ended = f"could not be started: {refused}" if refused else unit.ended if unit else "its record is missing"
        s = replace(self.failed(s), unit=None, last_words=unit.last_words if unit else refused)
        return self.emptied(s, f"generation {s.generation} {ended or 'ended'}")

    def failed(self, s: SlotState) -> SlotState:
        """Count a failure: the first in a row is replaced at once, the following ones after 1, 2, 4 … seconds."""
        ready_since = s.unit.ready_since if s.unit else None
        stable = ready_since is not None and self.now - ready_since >= self.rules.stable_s
        failures = 1 if stable else s.failures + 1
        wait_s = 0.0 if failures == 1 else min(2.0 ** min(failures - 2, 32), self.rules.backoff_max_s)
        return replace(s, failures=failures, restarts=s.restarts + 1, not_before=self.now + wait_s)

    def leave(self, s: SlotState, unit: UnitState, grace_s: float, why: str, stays: bool = False) -> SlotState:
        """Tell the unit of a slot to stop."""
        leaving = Leaving(unit.generation, self.deadline(grace_s), why, stays)
        return self.move(replace(s, unit=None, leaving=(*s.leaving, leaving)), Event.LEAVES, why)

    def kill(self, s: SlotState, unit: UnitState, why: str) -> SlotState:
        """Kill the unit of a slot, which counts as a failure."""
        return self.leave(self.failed(s), unit, 0.0, f"{why}; killed")

    def apply_answer(self, s: SlotState, unit: UnitState, answer: Answer | None) -> SlotState:
        """Apply the result of a probe; None: the unit could not be probed yet."""
        match answer:
            case None:
                return s
            case Answered(report):
                event, why = _event_of(report)
                ready_since = None if event is Event.LOADS else unit.ready_since
                if event is Event.SERVES and ready_since is None:
                    ready_since = self.now
                heard = UnitState(unit.generation, unit.born, answered=True, ready_since=ready_since)
                return self.move(replace(s, unit=heard), event, why)
            case Silent(why):
                since = self.now if unit.silent_since is None else unit.silent_since
                unit = replace(unit, silent_since=since, silent_probes=unit.silent_probes + 1)
                s = replace(s, unit=unit)
                if unit.silent_probes >= 2 and s.state is ReplicaState.READY:
                    s = self.move(s, Event.SUFFERS, f"does not answer: {why}")
                if self.now - since < self.rules.unresponsive_s or unit.silent_probes < self.rules.silent_probes_min:
                    return s
                return self.kill(s, unit, f"no answer for {self.now - since:.0f} s ({why})")

    def enforce_timeouts(self, s: SlotState, unit: UnitState, slot: Slot) -> SlotState:
        """Kill a unit that takes too long to become ready, or to end after draining on its own."""
        age_s = self.now - s.since
        if not unit.answered and self.now - unit.born >= slot.listen_timeout_s:
            return self.kill(s, unit, f"did not answer within {slot.listen_timeout_s:.0f} s of its start")
        if s.state is ReplicaState.WARMING and age_s >= slot.load_timeout_s:
            return self.kill(s, unit, f"was not ready within {slot.load_timeout_s:.0f} s")
        if s.state is ReplicaState.DRAINING and age_s >= slot.drain_grace_s + self.rules.unresponsive_s:
            return self.kill(s, unit, "was told to stop by something other than control, and did not end")
        return s

    def retire(self) -> None:
        """Stop units that are undesired or outdated; of a group, one ready unit at a time."""
        for id, s in self.states.items():
            unit = self.units.get((id, s.unit.generation)) if s.unit else None
            if not unit or not s.unit:
                continue
            slot = self.slots.get(id)
            if slot is None:
                self.states[id] = self.leave(s, s.unit, unit.drain_grace_s, self.rules.unwanted_why)
            elif unit.digest != slot.digest:
                others = [
                    self.states[x.id].state
                    for x in self.slots.values()
                    if x.group == slot.group and x.id != id and not x.waits
                ]
                if s.state is ReplicaState.READY and any(x is not ReplicaState.READY for x in others):
                    self.states[id] = replace(s, why="outdated; waiting for the others to be ready")
                else:
                    why = slot.moves or "outdated: its settings, model or version of Forebay have changed"
                    alone = slot.kind is Kind.GATEWAY and not others  # no other gateway listens on the port
                    self.states[id] = self.leave(s, s.unit, unit.drain_grace_s, why, stays=alone)

    def place(self) -> list[Place]:
        """Fill empty slots, gateways first, then the first replica of every model."""
        replicas = [self.states[x.id].state for x in self.slots.values() if x.kind is Kind.REPLICA]
        room = self.rules.starting_max - sum(x in (ReplicaState.STARTING, ReplicaState.WARMING) for x in replicas)
        places = []
        for slot in sorted(self.slots.values(), key=lambda x: (x.kind is not Kind.GATEWAY, x.index, x.id)):
            s = self.states[slot.id]
            # A replica may need all the memory there is, so its successor waits; gateways share their port.
            waits = s.leaving and slot.kind is Kind.REPLICA
            if s.unit or waits or self.now < s.not_before:
                continue
            if slot.waits:
                self.states[slot.id] = replace(s, why=slot.waits)
                continue
            if slot.kind is Kind.REPLICA:
                if room <= 0:
                    why = f"waits: {self.rules.starting_max} other replicas are starting"
                    self.states[slot.id] = replace(s, why=why)
                    continue
                room -= 1
            why = f"replaces generation {s.generation}" if s.generation else "wanted"
            s = replace(s, generation=s.generation + 1, unit=UnitState(s.generation + 1, self.now))
            self.states[slot.id] = self.move(s, Event.PLACED, why)
            places.append(Place(slot, s.generation, why))
        return places

    def remove(self) -> list[Remove]:
        """Stop leaving units and remove dead ones, but keep the newest of a desired slot: its logs may be read."""
        removes = []
        for (id, generation), unit in sorted(self.units.items()):
            s = self.states[id]
            if not unit.alive and (id not in self.slots or generation < s.generation):
                removes.append(Remove(id, generation, 0.0, "has ended"))
            for leaving in s.leaving:
                if unit.alive and leaving.generation == generation and not leaving.stays:
                    removes.append(Remove(id, generation, max(leaving.by - self.now, 0.0), leaving.why))
        return removes

    def look_again_s(self, slots: Iterable[SlotState]) -> float:
        """Delay until the next look, for changes that arrive without a notification."""
        again = self.rules.look_again_s
        for s in slots:
            if s.unit is None and not s.leaving:
                again = min(again, max(s.not_before - self.now, self.rules.look_again_starting_s))
            elif s.leaving or s.state in (ReplicaState.STARTING, ReplicaState.WARMING):
                again = min(again, self.rules.look_again_starting_s)
        return again


def _event_of(report: LoadReport | None) -> tuple[Event, str]:
    match report.state if report else ReplicaState.READY:
        case ReplicaState.READY:
            return Event.SERVES, "ready"
        case ReplicaState.STARTING | ReplicaState.WARMING:
            return Event.LOADS, "loading its engine"
        case ReplicaState.DEGRADED | ReplicaState.QUARANTINED:
            stalled_s = report.stalled_s if report else 0.0
            why = f"its engine has been unresponsive for {stalled_s:.0f} s" if stalled_s else "degraded"
            return Event.SUFFERS, why
        case ReplicaState.DRAINING | ReplicaState.STOPPED:
            return Event.LEAVES, "draining: told to stop by something other than control"
