"""Autoscaling settings of the cluster file, and conflicts in them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import Field

from forebay.core.errors import Conflict
from forebay.core.scaling.schedule import DAYS_PATTERN, TIME_PATTERN, Hours, days_of, is_zone, minutes_of
from forebay.core.section import Section, sections

REPLICAS_MAX: Final = 1000
Count = Annotated[int, Field(ge=0, le=REPLICAS_MAX)]
Seconds = Annotated[float, Field(ge=0, le=604_800)]


class Policy(StrEnum):
    """The scaling policy. All but the first are other systems' published rules."""

    FOREBAY = "forebay"
    HPA = "hpa"
    KPA = "kpa"
    APA = "apa"
    SLO = "slo"


class Signal(StrEnum):
    """A metric by which a model can be scaled."""

    CONCURRENCY = "concurrency"
    """Requests in flight or queued, per ready replica."""
    QUEUE = "queue"
    """Requests queued in gateways, per ready replica."""
    BACKLOG_TOKENS = "backlog_tokens"
    """Prompt tokens not prefilled yet, per ready replica."""
    KV_USE = "kv_use"
    """Share of the KV memory in use, 0..1."""
    BUSY = "busy"
    """Share of the slots in use, 0..1."""
    DUTY = "duty"
    """Share of the time in which the GPU is busy, 0..1."""
    TTFT_S = "ttft_s"
    """Time to the first token, p90, seconds."""
    TPOT_S = "tpot_s"
    """Time per token after the first, p90, seconds."""
    PREDICTED_TTFT_S = "predicted_ttft_s"
    """Predicted time to first token of a typical prompt, mean over ready replicas, seconds."""
    PREDICTED_TPOT_S = "predicted_tpot_s"
    """Predicted time per token after the first, mean over ready replicas, seconds."""
    REQUESTS_PER_GPU = "requests_per_gpu"
    """Requests in flight or queued, per GPU of the ready replicas."""


TARGETS: Final = {
    Signal.CONCURRENCY: 8.0,
    Signal.QUEUE: 1.0,
    Signal.BACKLOG_TOKENS: 8192.0,
    Signal.KV_USE: 0.8,
    Signal.BUSY: 0.7,
    Signal.DUTY: 0.7,
    Signal.TTFT_S: 1.0,
    Signal.TPOT_S: 0.05,
    Signal.PREDICTED_TTFT_S: 1.0,
    Signal.PREDICTED_TPOT_S: 0.05,
    Signal.REQUESTS_PER_GPU: 8.0,
}
"""Default targets for `hpa`, `kpa` and `apa`."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Add replicas to bring a signal below a limit."""

    signal: Signal
    above: float
    for_s: float = 120.0
    """How long it must have been above."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast replicas may be added, or removed."""

    window_s: float
    """How long a change must be called for."""
    replicas: int | None = None
    """Most replicas to add or remove within `in_s`; None: any number."""
    in_s: float = 60.0
    """Period that `replicas` refers to, seconds."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How many replicas a model may have, and the policy. `min` <= `max`, here and in the schedule."""

    max: int
    min: int = 1
    policy: Policy = Policy.FOREBAY
    shadow: bool = False
    signal: Signal = Signal.CONCURRENCY
    """What `hpa`, `kpa` and `apa` look at."""
    target: float = TARGETS[Signal.CONCURRENCY]
    """Their target for it, above 0."""
    limits: tuple[Limit, ...] = (Limit(Signal.KV_USE, 0.9, 10.0),)
    up: Pace = Pace(0.0)
    down: Pace = Pace(300.0)
    to_zero_after_s: float = 600.0
    lead_s: float | None = None
    """Start time of a replica; None: as measured."""
    schedule: tuple[Hours, ...] = ()
    weight: float = 1.0
    """Its weight in sharing the cluster's `limits`."""
    ttft_s: float | None = None
    """The objective in `slo`, 99th percentile; None: none."""
    tpot_s: float | None = None
    latency_s: float | None = None

    @property
    def most(self) -> int:
        """The largest maximum at any time."""
        return max([self.max, *(hours.max for hours in self.schedule if hours.max is not None)])


class SignalSettings(Section):
    """A signal that adds replicas, whatever the policy says."""

    signal: Signal
    """The signal."""
    above: Annotated[float, Field(gt=0, le=1e12)]
    """Replicas are added while the signal is above this: as many as bring it below, if it falls with their number."""
    for_s: Seconds = 120.0
    """How long it must have been above, seconds."""

    def value(self) -> Limit:
        """The limit."""
        return Limit(self.signal, self.above, self.for_s)


class PaceSettings(Section):
    """How fast replicas may be added, or removed."""

    window_s: Seconds | None = None
    """Stabilization window: how long a change must be called for, seconds; none: 0 to add replicas; to remove them
    300 with `policy: forebay` and 0 with the others, which have windows of their own."""
    replicas: Annotated[int, Field(ge=1, le=REPLICAS_MAX)] | None = None
    """Most replicas to add or remove within `in_s`; none: any number."""
    in_s: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    """Period that `replicas` refers to, seconds."""

    def value(self, usual: Pace) -> Pace:
        """The pace."""
        return Pace(usual.window_s if self.window_s is None else self.window_s, self.replicas, self.in_s)


class HoursSettings(Section):
    """Other bounds at some times of the week. The first matching entry applies."""

    days: Annotated[str, Field(pattern=DAYS_PATTERN, examples=["mon-fri", "sat,sun"])] = "mon-sun"
    """Days on which the period begins."""
    start: Annotated[str, Field(pattern=TIME_PATTERN, examples=["08:00"])] = "00:00"
    """Time of day at which the period begins."""
    end: Annotated[str, Field(pattern=TIME_PATTERN, examples=["20:00"])] = "24:00"
    """Time of day at which the period ends; on the next day if not after `start`."""
    zone: Annotated[str, Field(examples=["Europe/Berlin"])] = "UTC"
    """Time zone."""
    min: Count | None = None
    """Fewest replicas; none: as at other times."""
    max: Annotated[int, Field(ge=1, le=REPLICAS_MAX)] | None = None
    """Most replicas; none: as at other times."""

    def value(self) -> Hours:
        """The hours."""
        start, end = minutes_of(self.start), minutes_of(self.end)
        return Hours(days_of(self.days), start, end, self.zone, self.min, self.max)


class ScaleSettings(Section):
    """Autoscaling of a model. Only `max` is required."""

    max: Annotated[int, Field(ge=1, le=REPLICAS_MAX)]
    """Most replicas."""
    min: Count = 1
    """Fewest replicas. 0: scale to zero when idle; requests then wait in the gateway until a replica has started."""
    policy: Policy = Policy.FOREBAY
    """`forebay` learns what a replica can serve within `slo`, and forecasts load. `hpa` (Kubernetes), `kpa` (Knative)
    and `apa` (AIBrix) keep `signal` at `target`; `slo` (llm-d) compares the p90 with `slo`."""
    shadow: bool = False
    """Shadow mode: only report what would be done; the model keeps `replicas`."""
    signal: Signal = Signal.CONCURRENCY
    """What `hpa`, `kpa` and `apa` look at."""
    target: Annotated[float, Field(gt=0, le=1e12)] | None = None
    """Target value of `signal`; none: a default for that signal."""
    signals: tuple[SignalSettings, ...] = (SignalSettings(signal=Signal.KV_USE, above=0.9, for_s=10.0),)
    """Signals that add replicas, whatever the policy says."""
    up: PaceSettings = PaceSettings()
    """How fast replicas are added."""
    down: PaceSettings = PaceSettings()
    """How fast they are removed."""
    to_zero_after_s: Seconds = 600.0
    """With `min: 0`: remove the last replica after this time without a request, seconds."""
    lead_s: Seconds | None = None
    """How long a replica takes to become ready, seconds; none: as measured. Load is forecast this far ahead."""
    schedule: tuple[HoursSettings, ...] = ()
    """Other bounds at some times."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Share of this model where the cluster's `limits` are too small for all: 2 gets twice as much as 1. `min` is
    granted first, and what no other model wants is always available."""

    def value(
        self, ttft_s: float | None = None, tpot_s: float | None = None, latency_s: float | None = None
    ) -> Scale:
        """The scaling of a model with these objectives, 99th percentiles."""
        usual = USUAL if self.policy is Policy.FOREBAY else OTHERS
        return Scale(
            max=self.max,
            min=self.min,
            policy=self.policy,
            shadow=self.shadow,
            signal=self.signal,
            target=TARGETS[self.signal] if self.target is None else self.target,
            limits=tuple(each.value() for each in self.signals),
            up=self.up.value(usual.up),
            down=self.down.value(usual.down),
            to_zero_after_s=self.to_zero_after_s,
            lead_s=self.lead_s,
            schedule=tuple(each.value() for each in self.schedule),
            weight=self.weight,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            latency_s=latency_s,
        )


USUAL: Final = Scale(1)
"""Defaults."""
OTHERS: Final = Scale(1, down=Pace(0.0))
"""Defaults of policies that have windows of their own."""


def scale_conflicts(raw: Mapping[str, Any]) -> Iterator[Conflict]:
    """Conflicts between numbers of replicas, in a cluster given as unvalidated data."""
    for index, model in enumerate(sections(raw.get("models"))):
        section, path = model.get("scale"), f"models[{index}]"
        given = section if isinstance(section, Mapping) else {}
        replicas, least, most = model.get("replicas"), given.get("min", USUAL.min), given.get("max")
        if replicas == 0 and least != 0:
            yield Conflict(f"{path}.replicas", "0", "at least 1, or `scale` with `min: 0`")
        if _over(replicas, most):
            yield Conflict(f"{path}.replicas", str(replicas), f"at most {most}, the `scale.max`")
        if _over(least, most):
            yield Conflict(f"{path}.scale.min", str(least), f"at most {most}, the `max`")
        if given.get("policy") == Policy.SLO and not _promised(model.get("slo")):
            allowed = '"forebay", or `slo` of the model with `ttft_p99_ms` or `tpot_p99_ms`'
            yield Conflict(f"{path}.scale.policy", '"slo"', allowed)
        for place, hours in enumerate(sections(given.get("schedule"))):
            yield from _hours_conflicts(f"{path}.scale.schedule[{place}]", hours, least, most)


def _hours_conflicts(path: str, hours: Mapping[str, Any], least: Any, most: Any) -> Iterator[Conflict]:
    zone = hours.get("zone")
    if isinstance(zone, str) and not is_zone(zone):
        yield Conflict(f"{path}.zone", f'"{zone}"', "a time zone such as `Europe/Berlin`, or `UTC`")
    low, high = hours.get("min"), hours.get("max")
    key = "max" if low is None else "min"
    low, high = least if low is None else low, most if high is None else high
    if _over(low, high):
        allowed = f"at most {high}, the `max` then" if key == "min" else f"at least {low}, the `min` then"
        yield Conflict(f"{path}.{key}", str(low if key == "min" else high), allowed)


def _over(low: Any, high: Any) -> bool:
    return isinstance(low, int) and isinstance(high, int) and low > high >= 1


def _promised(slo: Any) -> bool:
    return isinstance(slo, Mapping) and any(slo.get(key) is not None for key in ("ttft_p99_ms", "tpot_p99_ms"))
