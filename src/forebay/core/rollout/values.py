"""What a rollout is judged by, what is known so far, and what a verdict says."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

STRATA_MAX: Final = 16
"""Of one metric. Observations of further ones are not counted but in `State.ignored`."""
FACTOR: Final = 4
TOKENS_MIN: Final = 256
BUCKETS: Final = 6


class Arm(StrEnum):
    """Who answered."""

    STABLE = "stable"
    CANARY = "canary"


class Observation(NamedTuple):
    """One figure of one request."""

    metric: str
    arm: Arm
    value: float
    """Rate: 0 or 1. Time: above 0. Score: 0..1, or, if paired, canary less stable on the same prompt, -1..1."""
    stratum: str = ""
    """Requests of a stratum are alike but for the arm, such as a range of prompt lengths."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A share of requests to which something happens: errors, refusals, degenerate answers."""

    name: str
    ratio: float = 2.0
    """The canary may have so many times the odds of the stable arm; below a tenth, odds are about shares ..."""
    floor: float = 0.005
    """... and whatever the stable arm has, a share up to this one, above 0 and below 1."""
    required: bool = True
    """Whether promotion waits for proof. Proof of harm always counts."""


@dataclass(frozen=True, slots=True)
class Time:
    """A positive figure of which the ratio matters: TTFT, time per token, latency, length of answers."""

    name: str
    ratio: float = 1.1
    """The canary's figures may be so many times as large."""
    tail: float = 0.95
    """A quantile that is judged besides the centre, 0.5..1; 0: none."""
    tail_ratio: float = 1.25
    both_ways: bool = False
    """Whether figures below 1 / ratio are as bad, as with the length of answers."""
    required: bool = True


@dataclass(frozen=True, slots=True)
class Score:
    """Quality, 0..1, more is better."""

    name: str
    drop: float = 0.02
    """The canary's mean may be lower by so much."""
    paired: bool = False
    """Both arms answered the same prompts, as with shadowed traffic."""
    required: bool = True


Metric: TypeAlias = Rate | Time | Score


@dataclass(frozen=True, slots=True)
class Rules:
    """What is asked, and how sure one wants to be. Metrics have different names."""

    metrics: tuple[Metric, ...]
    rollback_alpha: float = 0.05
    """Chance that any metric of a canary within all tolerances is ever called worse, however often one looks."""
    promote_alpha: float = 0.05
    """Chance that a canary beyond the tolerance of a required metric is ever called fine."""


class Cell(NamedTuple):
    """Requests and events of both arms."""

    stable: int = 0
    stable_events: int = 0
    canary: int = 0
    canary_events: int = 0

    def plus(self, other: "Cell") -> "Cell":
        """Both together."""
        return Cell(*(mine + more for mine, more in zip(self, other, strict=True)))


NOTHING_SEEN: Final = Cell()


class Waiting(NamedTuple):
    """Figures that wait until there are enough of both arms to be compared."""

    stable: tuple[float, ...] = ()
    canary: tuple[float, ...] = ()


class Shift(NamedTuple):
    """Weighted sums of the differences `d` between the arms within blocks; from them come effects and intervals."""

    weight: float = 0.0
    weighted: float = 0.0
    """w·d"""
    squares: float = 0.0
    """w²"""
    squares_d: float = 0.0
    squares_dd: float = 0.0

    def plus(self, difference: float, weight: float) -> "Shift":
        """With one more block."""
        square = weight * weight
        return Shift(
            self.weight + weight,
            self.weighted + weight * difference,
            self.squares + square,
            self.squares_d + square * difference,
            self.squares_dd + square * difference * difference,
        )

    @property
    def mean(self) -> float:
        """The difference; nan before the first block."""
        return self.weighted / self.weight if self.weight else math.nan


NOTHING_SHIFTED: Final = Shift()


class Swing(NamedTuple):
    """How much sums of so many blocks in a row differ from the next so many, see `ranks`."""

    held: float | None = None
    pairs: int = 0
    squares: float = 0.0


@dataclass(frozen=True, slots=True)
class RateState:
    """Of one `Rate`."""

    odds: tuple[float, ...]
    """Log likelihood of what was seen, at each odds ratio of the grid."""
    total: Cell = NOTHING_SEEN
    waiting: Mapping[str, Cell] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TimeState:
    """Of one `Time`."""

    up: tuple[float, ...]
    """Log evidence against "as much larger as is tolerated", for each tilt."""
    down: tuple[float, ...]
    """The same against "as much smaller"."""
    tail: tuple[float, ...]
    """As `RateState.odds`, of figures beyond the stable arm's quantile."""
    tail_total: Cell = NOTHING_SEEN
    blocks: int = 0
    canary: int = 0
    waiting: Mapping[str, Waiting] = field(default_factory=dict)
    sketches: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """Of the stable arm: how many figures in which range, see `sketch`."""
    shift: Shift = NOTHING_SHIFTED
    """Of the logarithms."""
    swings: tuple[Swing, ...] = ()
    tail_swings: tuple[Swing, ...] = ()


@dataclass(frozen=True, slots=True)
class ScoreState:
    """Of one `Score`."""

    bets: tuple[float, ...]
    """Log wealth of each bet."""
    canary: int = 0
    waiting: Mapping[str, Waiting] = field(default_factory=dict)
    shift: Shift = NOTHING_SHIFTED


@dataclass(frozen=True, slots=True)
class State:
    """All that is kept of a rollout's observations: it does not grow with them, and JSON can hold it."""

    rates: Mapping[str, RateState]
    times: Mapping[str, TimeState]
    scores: Mapping[str, ScoreState]
    ignored: int = 0
    """Observations of unknown metrics, of too many strata, or with impossible values."""


class Finding(StrEnum):
    """What is known of one question."""

    WORSE = "worse"
    FINE = "fine"
    OPEN = "open"


class Decision(StrEnum):
    """Of a rollout."""

    PROMOTE = "promote"
    ROLLBACK = "rollback"
    INCONCLUSIVE = "inconclusive"


class Part(NamedTuple):
    """One judged property of one metric."""

    metric: str
    part: str
    """rate, centre, below (too small), tail, score"""
    finding: Finding
    worse_p: float
    """Always-valid p of "worse than tolerated", before Holm's correction."""
    fine_p: float
    effect: float
    """Odds ratio, ratio, odds ratio beyond the quantile, or difference; nan if unknown."""
    seen: str
    """The same in words."""
    canary_samples: int
    needed_samples: float
    """Further ones of the canary until it would be worse or fine, if what was seen goes on; inf: never."""
    required: bool


class Verdict(NamedTuple):
    """What to do, and why."""

    decision: Decision
    reason: str
    parts: tuple[Part, ...]
    needed_samples: float = 0.0
    """Of an inconclusive one: further requests of the canary until a decision; inf: never at what is seen now."""
    needed_s: float = 0.0
    """The same in seconds; inf also if the rate is not known."""


def stratum_of(prompt_tokens: int) -> str:
    """The range of prompt lengths, each up to four times as long as the one before, named by its end."""
    bucket = 0
    while bucket < BUCKETS and prompt_tokens > TOKENS_MIN * FACTOR**bucket:
        bucket += 1
    return "longer" if bucket == BUCKETS else str(TOKENS_MIN * FACTOR**bucket)
