"""Units without processes: what `decide` asks for is done at once, and what tests want goes wrong."""

from dataclasses import dataclass, field, replace

from forebay.core.model import Endpoint, GatewaySpec, LoadReport, ReplicaState, Task, WorkerSpec
from forebay.core.reconcile import (
    Answer,
    Answered,
    ClusterObservation,
    Kind,
    ObservedUnit,
    Place,
    Remove,
    Rules,
    Silent,
    Slot,
    State,
    UnitKey,
    Verdict,
    decide,
)

STARTS_S = 0.3
LOADS_S = 1.0


def replica(model: str, index: int = 0, digest: str = "d1", grace_s: float = 5.0) -> Slot:
    id = f"{model}-{index}"
    spec = WorkerSpec(id, 0, model, "r-1", Task.CHAT, "synthetic", "", "")
    return Slot(id, Kind.REPLICA, model, index, digest, spec, 10.0, 20.0, grace_s)


def gateway(index: int = 0, digest: str = "g1") -> Slot:
    spec = GatewaySpec(f"gateway-{index}", 0, "127.0.0.1", 8080, "", "", "")
    return Slot(spec.id, Kind.GATEWAY, "gateway", index, digest, spec, 10.0, 20.0, 5.0)


@dataclass
class Unit:
    """A pretended process."""

    seen: ObservedUnit
    born: float
    asked_at: float | None = None
    hangs: bool = False
    stalled_s: float = 0.0
    """Its engine has given no sign of life for so long: it says so itself."""
    drains_s: float = 0.5


@dataclass
class World:
    """Time, units, and control's state."""

    wanted: list[Slot]
    rules: Rules = field(default_factory=Rules)
    now: float = 100.0
    state: State = field(default_factory=State)
    units: dict[UnitKey, Unit] = field(default_factory=dict)
    refuse: str = ""
    dies_at_once: bool = False
    refused: dict[str, str] = field(default_factory=dict)
    placed: list[tuple[float, str, int]] = field(default_factory=list)
    pid: int = 0

    def live(self, slot: str = "") -> list[int]:
        """Generations of the live units of a slot, or of all slots."""
        return [g for (s, g), u in sorted(self.units.items()) if u.seen.alive and slot in ("", s)]

    def slot(self, id: str) -> ReplicaState:
        return {s.id: s.state for s in self.state.slots}[id]

    def add(self, slot: Slot, generation: int, age_s: float = 60.0) -> None:
        """A unit that runs already."""
        self.pid += 1
        endpoint = Endpoint(self.pid, "127.0.0.1", self.pid)
        seen = ObservedUnit(slot.id, generation, slot.kind, slot.digest, slot.drain_grace_s, True, self.pid, endpoint)
        self.units[seen.key] = Unit(seen, self.now - age_s)

    def kill(self, slot: str, generation: int | None = None, words: str = "ouch") -> None:
        generation = generation if generation is not None else max(self.live(slot))
        unit = self.units[slot, generation]
        unit.seen = replace(
            unit.seen, alive=False, endpoint=None, ended="was killed by signal 9 (SIGKILL)", last_words=words
        )

    def look(self) -> ClusterObservation:
        """What control sees now."""
        answers: dict[UnitKey, Answer] = {}
        for key, unit in self.units.items():
            drained = unit.asked_at is not None and not unit.hangs and self.now - unit.asked_at >= unit.drains_s
            if drained and unit.seen.alive:
                unit.seen = replace(unit.seen, alive=False, endpoint=None, ended="ended with exit code 0")
            age_s = self.now - unit.born
            if unit.seen.alive and age_s >= STARTS_S:
                answers[key] = Silent("nothing within 1 s") if unit.hangs else self._answer(unit, age_s)
        seen = ClusterObservation(tuple(u.seen for _, u in sorted(self.units.items())), answers, self.refused)
        self.refused = {}
        return seen

    def _answer(self, unit: Unit, age_s: float) -> Answer:
        if unit.seen.kind is Kind.GATEWAY:
            return Answered()
        state = ReplicaState.READY if age_s >= STARTS_S + LOADS_S else ReplicaState.WARMING
        if unit.asked_at is not None:
            state = ReplicaState.DRAINING
        elif unit.stalled_s:
            state = ReplicaState.DEGRADED
        slot, generation = unit.seen.slot, unit.seen.generation
        return Answered(LoadReport(slot, generation, "m", "r-1", state, stalled_s=unit.stalled_s))

    def turn(self, seen: ClusterObservation | None = None) -> Verdict:
        """One round, without passing time."""
        self.state, verdict = decide(self.wanted, self.state, seen or self.look(), self.now, self.rules)
        for action in verdict.actions:
            match action:
                case Place(slot, generation):
                    self._place(slot, generation)
                case Remove(slot, generation, grace_s):
                    self._remove((slot, generation), grace_s)
        return verdict

    def _place(self, slot: Slot, generation: int) -> None:
        self.placed.append((self.now, slot.id, generation))
        if self.refuse:
            self.refused[slot.id] = self.refuse
            return
        assert (slot.id, generation) not in self.units
        if slot.kind is Kind.REPLICA:
            assert self.live(slot.id) == []
        self.add(slot, generation, age_s=0.0)
        if self.dies_at_once:
            self.kill(slot.id, generation, "cannot go on")

    def _remove(self, key: UnitKey, grace_s: float) -> None:
        unit = self.units[key]
        if not unit.seen.alive:
            assert grace_s == 0
            del self.units[key]
        elif grace_s <= 0:
            self.kill(*key)
        elif unit.asked_at is None:
            unit.asked_at = self.now

    def run(self, seconds: float) -> list[Verdict]:
        """Rounds, as often as the verdicts ask for."""
        until, verdicts = self.now + seconds, []
        while self.now < until:
            verdict = self.turn()
            verdicts.append(verdict)
            self.now += min(verdict.look_again_s, max(until - self.now, 0.01))
        return verdicts

    def settle(self) -> None:
        """Rounds until everything wanted is ready and nothing is left to do; for 10 minutes at the most."""
        for _ in range(3000):
            verdict = self.turn()
            states = [s.state for s in self.state.slots]
            if not verdict.actions and states == [ReplicaState.READY] * len(self.wanted):
                return
            self.now += verdict.look_again_s
