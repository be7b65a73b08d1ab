"""The inputs and decisions of the autoscaler."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Reading:
    """A reading of one model, over all gateways. Counts are of the `since_s` seconds before `at`."""

    at: float
    """Wall time, seconds since the epoch."""
    since_s: float
    """Above 0."""
    ready: int
    """Replicas that accept requests."""
    pending: int
    """Replicas that are placed or starting."""
    arrivals: int
    """Requests received, including rejected ones."""
    prompt_tokens: int
    """Of the arrivals; an estimate."""
    completions: int
    """Successful responses."""
    output_tokens: int
    """Of the completions."""
    refused: int
    """Rejected for lack of capacity or time."""
    waiting: int
    """Queued in gateways at `at`."""
    in_flight: float
    """Requests in flight or queued, mean over `since_s`."""
    backlog_tokens: int
    """Prompt tokens queued in gateways, or in replicas before prefill, at `at`; an estimate."""
    kv_use: float | None = None
    """Share of the KV memory in use, 0..1, mean over ready replicas."""
    busy: float | None = None
    """Share of the slots in use, 0..1, mean over ready replicas."""
    ttft_s: float | None = None
    """90th percentile of times to first token (of responses, if there are no tokens) within `since_s`."""
    tpot_s: float | None = None
    """90th percentile of the time per token after the first."""
    duty: float | None = None
    """Share of the time in which the GPU is busy, 0..1."""
    cold_start_s: float | None = None
    """From placement of a replica until it is ready, 90th percentile of the last ones."""
    late: int | None = None
    """Completions that missed the `slo`; None: not counted."""
    predicted_ttft_s: float | None = None
    """Predicted time to first token of a typical prompt at `at`; None: nothing learned yet."""
    predicted_tpot_s: float | None = None
    """Predicted time per token after the first."""
    gpus: float = 0.0
    """GPUs per replica; fractional if shared. 0: none."""


class Reason(StrEnum):
    """The reason of a decision."""

    STEADY = "steady"
    """The current number is right."""
    LOAD = "load"
    """The current load needs more."""
    FORECAST = "forecast"
    """The load expected by the time a new replica is ready needs more."""
    PANIC = "panic"
    """Far more load than capacity: several replicas are added at once, and none removed until it is over."""
    SIGNAL = "signal"
    """A signal exceeded its limit for its time."""
    RULE = "rule"
    """The rule of `policy` requires it."""
    SPARE = "spare"
    """Fewer suffice, also for the expected load."""
    WAKE = "wake"
    """There was no replica, and a request arrived."""
    IDLE = "idle"
    """No request for so long that no replica is needed."""
    BOUND = "bound"
    """`min` or `max`, of the model or of its schedule."""
    LIMIT = "limit"
    """`limits` of the cluster: the other models use the rest."""
    WAIT = "wait"
    """Another number is recommended, but delayed by the rate or window of `up` or `down`."""
    UNKNOWN = "unknown"
    """The load, or the signal it is scaled by, is unknown: replicas are not removed."""


class Wish(NamedTuple):
    """The recommendation of a policy or a common rule, before bounds and windows."""

    wanted: int
    reason: Reason
    why: str
    figures: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Decision:
    """The desired number of replicas."""

    wanted: int
    reason: Reason
    why: str
    """An explanation with the figures."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """By name; units are suffixes (seconds, tokens, requests)."""
