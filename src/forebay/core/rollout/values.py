"""Values of rollout statistics: metrics and rules, the accumulated state, and verdicts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

STRATA_MAX: Final = 16
"""Most strata per metric. Observations of further ones are only counted in `State.ignored`."""
FACTOR: Final = 4
TOKENS_MIN: Final = 256
BUCKETS: Final = 6


class Arm(StrEnum):
    """The revision that answered."""

    STABLE = "stable"
    CANARY = "canary"


class Observation(NamedTuple):
    """One value of one request."""

    metric: str
    arm: Arm
    value: float
    """Rate: 0 or 1. Time: above 0. Score: 0..1 or, if paired, canary minus stable on the same prompt, -1..1."""
    stratum: str = ""
    """Requests of a stratum differ only in their arm, such as a range of prompt lengths."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A share of requests with some event: errors, refusals, degenerate answers."""

    name: str
    ratio: float = 2.0
    """Tolerated ratio of the canary's odds to the stable arm's; below a tenth, odds are about shares ..."""
    floor: float = 0.005
    """... and in any case this share, above 0 and below 1, is tolerated."""
    required: bool = True
    """Whether promotion waits for proof. Proof of harm always counts."""


@dataclass(frozen=True, slots=True)
class Time:
    """A positive value compared by ratio: TTFT, time per token, latency, length of answers."""

    name: str
    ratio: float = 1.1
    """Tolerated ratio of the canary's values to the stable arm's."""
    tail: float = 0.95
    """A quantile that is judged besides the centre, 0.5..1; 0: none."""
    tail_ratio: float = 1.25
    both_ways: bool = False
    """Whether values below 1 / ratio are as bad, as for the length of answers."""
    required: bool = True


@dataclass(frozen=True, slots=True)
class Score:
    """Quality, 0..1, more is better."""

    name: str
    drop: float = 0.02
    """Tolerated decrease of the canary's mean."""
    paired: bool = False
    """Both arms answered the same prompts, as with shadowed traffic."""
    required: bool = True


Metric: TypeAlias = Rate | Time | Score


@dataclass(frozen=True, slots=True)
class Rules:
    """The metrics, and the error probabilities. Metrics have distinct names."""

    metrics: tuple[Metric, ...]
    rollback_alpha: float = 0.05
    """Probability that any metric of a canary within all tolerances is ever called worse, however often it is
    evaluated."""
    promote_alpha: float = 0.05
    """Probability that a canary beyond the tolerance of a required metric is ever called fine."""


class Cell(NamedTuple):
    """Requests and events of both arms."""

    stable: int = 0
    stable_events: int = 0
    canary: int = 0
    canary_events: int = 0

    def plus(self, other: "Cell") -> "Cell":
        """The sum of both."""
        return Cell(*(mine + more for mine, more in zip(self, other, strict=True)))


NOTHING_SEEN: Final = Cell()


class Waiting(NamedTuple):
    """Values that wait until there are enough of both arms to be compared."""

    stable: tuple[float, ...] = ()
    canary: tuple[float, ...] = ()


class Shift(NamedTuple):
    """Weighted sums of the differences `d` between the arms within blocks, for effects and intervals."""

    weight: float = 0.0
    weighted: float = 0.0
    """w·d"""
    squares: float = 0.0
    """w²"""
    squares_d: float = 0.0
    squares_dd: float = 0.0

    def plus(self, difference: float, weight: float) -> "Shift":
        """The sums after one more block."""
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
        """The mean difference; nan before the first block."""
        return self.weighted / self.weight if self.weight else math.nan


NOTHING_SHIFTED: Final = Shift()


class Swing(NamedTuple):
    """Variation between neighbouring sums of blocks at one length, see `ranks`."""

    held: float | None = None
    pairs: int = 0
    squares: float = 0.0


@dataclass(frozen=True, slots=True)
class RateState:
    """State of one `Rate`."""

    odds: tuple[float, ...]
    """Log likelihood of the observations, at each odds ratio of the grid."""
    total: Cell = NOTHING_SEEN
    waiting: Mapping[str, Cell] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TimeState:
    """State of one `Time`."""

    up: tuple[float, ...]
    """Log evidence from ranks of canary / ratio among stable values, for each of `ranks.SIGNED`."""
    down: tuple[float, ...]
    """The same of canary x ratio."""
    tail: tuple[float, ...]
    """As `RateState.odds`, for values beyond the stable arm's quantile."""
    tail_total: Cell = NOTHING_SEEN
    blocks: int = 0
    canary: int = 0
    waiting: Mapping[str, Waiting] = field(default_factory=dict)
    sketches: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """Of the stable arm: counts by bucket, see `sketch`."""
    shift: Shift = NOTHING_SHIFTED
    """Of the logarithms."""
    swings: tuple[Swing, ...] = ()
    tail_swings: tuple[Swing, ...] = ()


@dataclass(frozen=True, slots=True)
class ScoreState:
    """State of one `Score`."""

    bets: tuple[float, ...]
    """Log wealth of each bet."""
    canary: int = 0
    waiting: Mapping[str, Waiting] = field(default_factory=dict)
    shift: Shift = NOTHING_SHIFTED


@dataclass(frozen=True, slots=True)
class State:
    """All that is kept of a rollout's observations: of constant size, and serialisable as JSON."""

    rates: Mapping[str, RateState]
    times: Mapping[str, TimeState]
    scores: Mapping[str, ScoreState]
    ignored: int = 0
    """Observations of unknown metrics, of too many strata, or with invalid values."""


class Finding(StrEnum):
    """The finding for one part."""

    WORSE = "worse"
    FINE = "fine"
    OPEN = "open"


class Decision(StrEnum):
    """The decision on a rollout."""

    PROMOTE = "promote"
    ROLLBACK = "rollback"
    INCONCLUSIVE = "inconclusive"


class Part(NamedTuple):
    """One judged property of a metric."""

    metric: str
    part: str
    """rate, centre, below (too small), tail, score"""
    finding: Finding
    worse_p: float
    """Always-valid p-value of "worse than tolerated", before Holm's correction."""
    fine_p: float
    effect: float
    """Odds ratio, ratio, odds ratio beyond the quantile, or difference; nan if unknown."""
    seen: str
    """The same in words."""
    canary_samples: int
    needed_samples: float
    """Further canary requests until it would be worse or fine at the current trend; inf: never."""
    required: bool


class Verdict(NamedTuple):
    """The decision, and why."""

    decision: Decision
    reason: str
    parts: tuple[Part, ...]
    needed_samples: float = 0.0
    """If inconclusive: further canary requests until a decision; inf: never at the current trend."""
    needed_s: float = 0.0
    """The same in seconds; inf also if the rate is not known."""


def stratum_of(prompt_tokens: int) -> str:
    """The stratum of a prompt: a range of lengths, named by its upper end; each range ends at four times the previous
    one."""
    bucket = 0
    while bucket < BUCKETS and prompt_tokens > TOKENS_MIN * FACTOR**bucket:
        bucket += 1
    return "longer" if bucket == BUCKETS else str(TOKENS_MIN * FACTOR**bucket)
