"""Results of a replay: per request, and summarised."""

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from forebay.core.errors import OK
from forebay.sim.load.values import Arrival

QUANTILES = (50, 90, 99)


class Slo(NamedTuple):
    """The limits within which a request counts as good."""

    ttft_s: float
    tpot_s: float


class Work(NamedTuple):
    """The work of one replica."""

    requests: int
    prefilled_tokens: int
    hit_tokens: int
    busy_s: float
    preemptions: int


class Worked(Protocol):
    """The work counters of a replica."""

    @property
    def prefilled_tokens(self) -> int:
        """Computed prompt tokens."""

    @property
    def hit_tokens(self) -> int:
        """Cached prompt tokens."""

    @property
    def busy_s(self) -> float:
        """Time in which it ran steps."""

    @property
    def preemptions(self) -> int:
        """Preempted requests."""


class Size(NamedTuple):
    """Numbers of replicas from a time on."""

    at_s: float
    wanted: int
    ready: int
    """Replicas that accept requests."""
    there: int
    """Replicas that occupy GPUs, including starting and draining ones."""


class Outcome:
    """Columns with an entry per request, in the order of arrival; times in seconds, NaN if there is none."""

    __slots__ = (
        "arrived_at",
        "cached_tokens",
        "codes",
        "ended_at",
        "first_at",
        "lasted_s",
        "output_tokens",
        "prompt_tokens",
        "ready_s",
        "replica",
        "replica_s",
        "replicas",
        "sizes",
        "started",
    )

    def __init__(self, requests: int) -> None:
        nothing = array("d", [math.nan]) * requests
        none, no = array("q", [0]) * requests, array("i", [-1]) * requests
        self.codes = [""] * requests
        """How each ended: `ok`, an error code, `cut_off`; empty: not at all."""
        self.arrived_at, self.first_at, self.ended_at = array("d", nothing), array("d", nothing), nothing
        self.prompt_tokens, self.output_tokens, self.cached_tokens = array("q", none), array("q", none), none
        self.replica = no
        """Index of the replica that finished it; -1: none."""
        self.replicas: list[Work] = []
        self.lasted_s = 0.0
        self.sizes: list[Size] = []
        """One per change."""
        self.started = 0
        """Replicas ordered after the start."""
        self.replica_s = self.ready_s = 0.0
        """Summed over replicas: time from the order, and from readiness, until they stopped."""

    def arrived(self, id: int, now: float, arrival: Arrival) -> None:
        """A client sends its request."""
        self.arrived_at[id] = now
        self.prompt_tokens[id] = arrival.prompt_tokens
        self.output_tokens[id] = arrival.output_tokens

    def served(self, id: int, replica: int, cached_tokens: int) -> None:
        """A replica has finished a request."""
        self.replica[id] = replica
        self.cached_tokens[id] = cached_tokens

    def ended(self, id: int, now: float, code: str) -> None:
        """A client got its response or an error."""
        self.ended_at[id] = now
        self.codes[id] = code

    def close(self, now: float, engines: Sequence[Worked]) -> None:
        """End of the replay. `engines`: of all replicas, which are assumed to have existed from the start."""
        self.lasted_s = now
        several = len(engines)
        self.sizes = [Size(0.0, several, several, several)]
        self.replica_s = self.ready_s = several * now
        requests = Counter(self.replica)
        self.replicas = [
            Work(requests[at], each.prefilled_tokens, each.hit_tokens, each.busy_s, each.preemptions)
            for at, each in enumerate(engines)
        ]


class Summary(NamedTuple):
    """Metrics of a replay. Times in seconds, of answered requests unless stated otherwise."""

    requests: int
    goodput: float
    """Share of all requests that were answered within both limits, 0..1."""
    goodput_per_s: float
    ttft_mean_s: float
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    e2e_s: tuple[float, ...]
    cache_hit: float
    """Cached share of prompt tokens."""
    imbalance: float
    """Computed prompt tokens of the busiest replica over the mean."""
    busy: float
    """Busy share of the replicas' time."""
    refused: dict[str, int]
    """Unanswered requests, by error code."""
    preemptions: int
    replica_hours: float
    lasted_s: float
    replicas_mean: float = 0.0
    """Mean number of replicas that occupied GPUs."""
    replicas_max: int = 0
    """Largest desired number."""
    turns: int = 0
    """How often the desired number changed direction."""
    started: int = 0
    """Replicas ordered after the start."""


def summary(outcome: Outcome, slo: Slo) -> Summary:
    """Summarise a replay; quantiles are those of `QUANTILES`."""
    arrived, first, ended = (np.array(x) for x in (outcome.arrived_at, outcome.first_at, outcome.ended_at))
    codes, output = outcome.codes, np.array(outcome.output_tokens)
    ok = np.array([code == OK for code in codes], dtype=bool)
    ttft, e2e = (first - arrived)[ok], (ended - arrived)[ok]
    tpot = ((ended - first) / np.maximum(output - 1, 1))[ok]
    good = int(np.sum((ttft <= slo.ttft_s) & (tpot <= slo.tpot_s)))
    prompts = float(np.sum(np.array(outcome.prompt_tokens)[ok]))
    busy = np.array([each.busy_s for each in outcome.replicas])
    read = np.array([each.prefilled_tokens for each in outcome.replicas])
    lasted_s = outcome.lasted_s or math.nan
    total = len(codes)
    return Summary(
        requests=total,
        goodput=good / total if total else math.nan,
        goodput_per_s=good / lasted_s,
        ttft_mean_s=float(np.mean(ttft)) if len(ttft) else math.nan,
        ttft_s=_quantiles(ttft),
        tpot_s=_quantiles(tpot[output[ok] > 1]),
        e2e_s=_quantiles(e2e),
        cache_hit=float(np.sum(np.array(outcome.cached_tokens)[ok])) / prompts if prompts else 0.0,
        imbalance=float(np.max(read) / np.mean(read)) if np.any(read) else 1.0,
        busy=float(np.sum(busy)) / outcome.ready_s if outcome.ready_s else math.nan,
        refused={code: count for code, count in sorted(Counter(codes).items()) if code != OK},
        preemptions=sum(each.preemptions for each in outcome.replicas),
        replica_hours=outcome.replica_s / 3600,
        lasted_s=outcome.lasted_s,
        replicas_mean=outcome.replica_s / lasted_s,
        replicas_max=max(size.wanted for size in outcome.sizes),
        turns=turns([size.wanted for size in outcome.sizes]),
        started=outcome.started,
    )


def turns(wanted: Sequence[int]) -> int:
    """How often a sequence changes direction."""
    ways = [after > before for before, after in pairwise(wanted) if after != before]
    return sum(before != after for before, after in pairwise(ways))


def _quantiles(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> tuple[float, ...]:
    if not len(values):
        return tuple(math.nan for _ in QUANTILES)
    return tuple(float(x) for x in np.percentile(values, QUANTILES))
