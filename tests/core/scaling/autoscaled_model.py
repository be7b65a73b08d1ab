"""Readings, and a model whose replicas take them, for tests."""

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise

import msgspec

from forebay.core.scaling.decide import decide
from forebay.core.scaling.settings import Scale
from forebay.core.scaling.state import AutoscalerState
from forebay.core.scaling.values import Decision, Reading

T0 = 1_715_385_600.0
"""Saturday, 11 May 2024, 0:00 UTC."""
QUIET = Reading(
    at=T0, since_s=5.0, ready=1, pending=0, arrivals=0, prompt_tokens=0, completions=0, output_tokens=0, refused=0,
    waiting=0, in_flight=0.0, backlog_tokens=0,
)  # fmt: skip
BUSY = replace(
    QUIET, arrivals=10, prompt_tokens=5000, completions=10, output_tokens=1000, in_flight=4.0, kv_use=0.2, busy=0.2,
    ttft_s=0.3, tpot_s=0.03, late=0,
)  # fmt: skip


@dataclass
class Model:
    """Replicas that come and go, and what the scaler sees: a fluid that queues, and answers late when it is dense."""

    scale: Scale
    replicas: int = 1
    cold_s: float = 60.0
    tick_s: float = 5.0
    each_per_s: float = 4.0
    """Requests per second of a replica that always has something to do."""
    kept_every: int = 97
    """After so many looks a new controller goes on from what is kept."""
    anyway: float = 0.0
    """Share of the answers that are late however little there is to do."""
    now: float = T0
    state: AutoscalerState = field(default_factory=AutoscalerState)
    decisions: list[Decision] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    late: float = 0.0
    answers: float = 0.0
    queue: float = 0.0
    _starts: list[float] = field(default_factory=list)

    @property
    def ready(self) -> int:
        """Those that take requests."""
        return self.replicas - len(self._starts)

    def look(self, per_s: float, known: bool = True, **other: object) -> Decision:
        """One tick with so many requests per second."""
        self.now += self.tick_s
        self._starts = [at for at in self._starts if at > self.now]
        reading = self._reading(per_s)
        seen = replace(reading, **other) if known else None  # type: ignore[arg-type]
        decision, state = decide(self.scale, self.state, seen, self.now, current=self.replicas)
        self.state = state
        if len(self.wanted) % self.kept_every == 0:
            self.state = msgspec.json.decode(msgspec.json.encode(state), type=AutoscalerState)
        change = decision.wanted - self.replicas
        if change > 0:
            self._starts += [self.now + self.cold_s] * change
        else:
            self._starts = self._starts[: max(len(self._starts) + change, 0)]
        self.replicas = decision.wanted
        self.decisions.append(decision)
        self.wanted.append(decision.wanted)
        return decision

    def _reading(self, per_s: float) -> Reading:
        arrivals, most = per_s * self.tick_s, self.ready * self.each_per_s * self.tick_s
        self.queue += arrivals
        done = min(self.queue, most)
        self.queue -= done
        use = min(done / most, 0.999) if most else 0.0
        dense = use ** math.sqrt(2 * (self.ready + 1))  # as in M/M/c: the chance to wait, about
        late = done if self.queue > most / 2 else done * min(dense / (1 - use) / 60, 1.0)
        late += (done - late) * self.anyway
        self.late, self.answers = self.late + late, self.answers + done
        return replace(
            QUIET,
            at=self.now,
            since_s=self.tick_s,
            ready=self.ready,
            pending=len(self._starts),
            arrivals=round(arrivals),
            prompt_tokens=round(arrivals * 500),
            completions=round(done),
            output_tokens=round(done * 100),
            waiting=round(self.queue),
            in_flight=self.ready * use * (1 + min(dense / (1 - use), 20.0)) + self.queue,
            late=round(late),
            cold_start_s=self.cold_s,
        )


def turns(wanted: list[int]) -> int:
    """How often replicas were added after some were removed, or the other way round."""
    ways = [after > before for before, after in pairwise(wanted) if after != before]
    return sum(one != other for one, other in pairwise(ways))
