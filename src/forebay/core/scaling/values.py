"""What the scaler sees of a model, and what it decides."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at one model, over all gateways. Counts are of the `since_s` seconds before `at`."""

    at: float
    """Wall time, seconds since the epoch."""
    since_s: float
    """Above 0."""
    ready: int
    """Replicas that take requests."""
    pending: int
    """Replicas that are placed or starting."""
    arrivals: int
    """Requests that came, also those that were refused."""
    prompt_tokens: int
    """Of the arrivals, estimates."""
    completions: int
    """Answers that ended well."""
    output_tokens: int
    """Of the completions."""
    refused: int
    """For want of room or time."""
    waiting: int
    """In gateways, at `at`."""
    in_flight: float
    """Requests under way or waiting, as a mean over `since_s`."""
    backlog_tokens: int
    """Prompt tokens that wait in gateways, or in replicas to be prefilled, at `at`; an estimate."""
    kv_use: float | None = None
    """Share of the KV memory in use, 0..1, mean over ready replicas."""
    busy: float | None = None
    """Share of the places in use, 0..1, mean over ready replicas."""
    ttft_s: float | None = None
    """90th percentile of the first tokens (of answers, where there are no tokens) that came within `since_s`."""
    tpot_s: float | None = None
    """90th percentile of the time per token after the first."""
    duty: float | None = None
    """Share of the time in which the GPU does anything, 0..1."""
    cold_start_s: float | None = None
    """From placing a replica to its being ready, 90th percentile of the last ones."""
    late: int | None = None
    """Of the completions, those that broke the promise of `slo`; None: not counted."""
    predicted_ttft_s: float | None = None
    """What the first token of a usual prompt would take if it came at `at`; None: nothing is learned yet."""
    predicted_tpot_s: float | None = None
    """What each token after it would take."""
    gpus: float = 0.0
    """Of each replica; of one that it shares, its part. 0: none."""


class Reason(StrEnum):
    """Why so many."""

    STEADY = "steady"
    """What there is, is right."""
    LOAD = "load"
    """The present load needs more."""
    FORECAST = "forecast"
    """The load that is expected by the time a new replica is ready needs more."""
    PANIC = "panic"
    """Far more load than there is capacity for: more at once, and none fewer until it is over."""
    SIGNAL = "signal"
    """A figure has been above its limit for its time."""
    RULE = "rule"
    """The rule of `policy` says so."""
    SPARE = "spare"
    """Fewer will do, also for what is expected."""
    WAKE = "wake"
    """There was none, and a request has come."""
    IDLE = "idle"
    """No request for so long that none is needed."""
    BOUND = "bound"
    """`min` or `max`, of the model or of its schedule."""
    LIMIT = "limit"
    """`limits` of the cluster: the other models have the rest."""
    WAIT = "wait"
    """It would be another number, but not yet: the pace, or a window, of `up` or `down`."""
    UNKNOWN = "unknown"
    """Nothing is known of the load, or of the signal that it is scaled by: not fewer."""


class Wish(NamedTuple):
    """What a policy wants, or one of the rules for all of them, before bounds and windows."""

    wanted: int
    reason: Reason
    why: str
    figures: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Decision:
    """How many replicas are wanted."""

    wanted: int
    reason: Reason
    why: str
    """A sentence with the figures that led to it."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """By name; those in seconds, tokens or requests say so with the end of it."""
