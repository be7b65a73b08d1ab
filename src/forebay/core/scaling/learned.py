"""The policy `forebay`: enough replicas for the load at the time when they are ready, within the objective."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from forebay.core.scaling import capacity, season, traffic
from forebay.core.scaling.capacity import EDGE, GOAL, WEIGHT_MIN, Capacity, Cell
from forebay.core.scaling.season import Season
from forebay.core.scaling.settings import Scale
from forebay.core.scaling.traffic import LEVEL_S, SHORT_S, Traffic
from forebay.core.scaling.values import Reading, Reason, Wish

FIT_EVERY_S: Final = 60.0
ALIKE_S: Final = 7200.0
"""Load-independent strain must persist this long to count; a few bursts may look like it for an hour."""
LEAD_S: Final = 60.0
"""Assumed start time of a replica while none was measured."""
DRAIN_S: Final = 45.0
"""The queue should be worked off within this time once the replicas are ready."""
BACKLOG_S: Final = 60.0
"""Upper bound of the queue, in arrival time: gateways reject more."""
SPARE_MIN: Final = 0.05
SPARE_MAX: Final = 0.25
"""Replicas are removed only if the others have this much capacity in reserve: the forecast error, within these
bounds."""
AHEAD_S: Final = 600.0
"""And only if they still have it this long after another replica could be ready again."""
AIM: Final = 0.85
EDGES: Final = (0.8, 2.5)
SPENT_S: Final = 21_600.0
"""The target is AIM of the late responses that the objective allows, averaged over SPENT_S: if there are fewer,
replicas may be loaded above EDGE, and vice versa, within EDGES."""
NOISE: Final = 3.0
"""Standard deviations by which the short-term load must exceed that of a minute to be significant."""
PANIC: Final = 1.5
"""It must also exceed the capacity within the objective by this factor: little more than the physical capacity."""
FULL: Final = 0.9
FULL_S: Final = 5.0
"""Before capacity is known: add replicas if requests wait while this share of the slots is used, for FULL_S and over
several readings ..."""
FULL_TIMES: Final = 2
"""... in proportion to the queue, at most by this factor: a first burst may soon be over."""
LATE_MAX: Final = 4.0
"""Strain of the last minute at which replicas are added whatever was learned; not for few responses, and not at low
concurrency, where more replicas would not help."""
TTFT_PART: Final = 0.6
TPOT_PART: Final = 0.85
LATENCY_PART: Final = 0.4
"""If late responses are not counted: the p90 (for latency, the mean) as a share of the 99th percentile objective when
it is just met."""
LONGER: Final = 3.0
"""Without an objective: factor by which requests may take longer than without concurrency."""
ALONE: Final = 0.5
"""Concurrency per replica below which requests hardly affect each other."""
AT_ONCE: Final = 4.0
"""Assumed concurrency of a replica while nothing is known."""
ALONE_MIN: Final = 10.0
"""Requests needed for the mean duration of a minute to be meaningful."""


Want: TypeAlias = tuple[int, Reason, str]
"""How many replicas, the reason, and its text."""


@dataclass(frozen=True, slots=True)
class Learned:
    """The learned state of the policy."""

    traffic: Traffic = field(default_factory=Traffic)
    season: Season = field(default_factory=Season)
    cells: tuple[Cell, ...] = ()
    """Responses by offered work per replica."""
    capacity: Capacity = field(default_factory=Capacity)
    """In work per second."""
    crowds: tuple[Cell, ...] = ()
    """Responses by concurrency per replica: closed-loop clients send no more than is answered, however slowly."""
    crowd: Capacity = field(default_factory=Capacity)
    """In concurrent requests."""
    anyway: float = 0.0
    """Load-independent strain; only strain above it counts."""
    alike_since: float = 0.0
    """Since when such strain was observed; 0: it is not."""
    asleep_at: float = 0.0
    """When there was last no replica."""
    fitted_at: float = 0.0
    lead_s: float = LEAD_S
    strain: float = 0.0
    """Strain of the last minute."""
    answers: float = 0.0
    strained: float = 0.0
    """Responses, and the sum of their strain, over SPENT_S."""
    alone_s: float = 0.0
    """Seconds per unit of work without concurrency; 0: unknown."""
    full_s: float = 0.0
    """How long requests have waited for full replicas, minus the time since in which none did."""


def wish(scale: Scale, learned: Learned, reading: Reading, now: float, current: int) -> tuple[Wish, Learned]:
    """The policy's recommendation, and its updated state."""
    lead_s = reading.cold_start_s if scale.lead_s is None else scale.lead_s
    flow = traffic.with_reading(learned.traffic, reading)
    known = replace(
        learned,
        traffic=flow,
        lead_s=learned.lead_s if lead_s is None else lead_s,
        full_s=_full_s(learned, reading, current),
    )
    wanted = _wish(known, learned.traffic, reading, now, current)
    seasons = season.with_level(known.season, flow.level, flow.slope(), known.lead_s + LEVEL_S, now)
    return wanted, _study(scale, replace(known, season=seasons), reading, now)


def without_load(learned: Learned) -> Learned:
    """The state after a gap: the capacity is still known, but not the load."""
    return replace(learned, traffic=learned.traffic._replace(seen_s=0.0, peaks=()), strain=0.0, full_s=0.0)


def set_back(learned: Learned, now: float) -> Learned:
    """The state after the clock was set back to `now`: without times that are still to come."""
    known, seasons = without_load(learned), learned.season._replace(forecasts=())
    asleep_at = min(learned.asleep_at, now)
    return replace(known, season=seasons, asleep_at=asleep_at, alike_since=0.0, fitted_at=0.0)


def _wish(known: Learned, before: Traffic, reading: Reading, now: float, current: int) -> Wish:
    flow, able = known.traffic, _able(known, reading)
    ahead = season.forecast(known.season, flow.level, flow.slope(), known.lead_s + LEVEL_S, now)
    figures = {
        "requests_per_s": flow.requests,
        "tokens_per_s": flow.level,
        "expected_tokens_per_s": ahead,
        "capacity_tokens_per_s": able.of(current) if current else 0.0,
        "replica_tokens_per_s": able.rate,
        "free": able.free,
        "lead_s": known.lead_s,
        "forecast_error": known.season.ways[season.best(known.season)].error,
        "late": known.strain * GOAL,
        "late_anyway": known.anyway * GOAL,
    }
    woken = now - known.asleep_at < 2 * LEVEL_S  # the queue for the first replica is being worked off
    unsure = known.capacity.rate <= 0 and (woken or flow.seen_s < LEVEL_S)
    crowded = list(_crowded(known, reading))
    if able.rate <= 0 or unsure or flow.seen_s < SHORT_S:
        little = current, Reason.STEADY, f"too little is known about the load yet{_since(known, now)}"
        return Wish(*next(iter(crowded), little), figures)
    wants = [*_wants(known, able, ahead), *crowded]
    wants += _trouble(known, able, before, reading, max(flow.level, ahead))
    many = flow.in_flight > current * ALONE and flow.requests * LEVEL_S >= WEIGHT_MIN
    late = known.strain - known.anyway if many else 0.0
    if late > LATE_MAX and not reading.pending and reading.ready >= current:
        wants.append((current + 1, Reason.LOAD, f"{known.strain * GOAL:.1%} of the last minute's answers were late"))
    most = max(wants, key=lambda want: want[0])
    if most[0] >= current:
        return Wish(*most, figures)
    if late > LATE_MAX / 2 or reading.waiting > 0:
        why = "requests wait" if reading.waiting > 0 else "answers are late"
        return Wish(current, Reason.STEADY, f"{most[2]}, but {why}", figures)
    return _spare(known, able, now, most[0], current)._replace(figures=figures)


def _since(known: Learned, now: float) -> str:
    """When there was last no replica, if it matters."""
    asleep_s = now - known.asleep_at
    return f": there was no replica {asleep_s:.0f} s ago" if asleep_s < 2 * LEVEL_S else ""


def _wants(known: Learned, able: Capacity, ahead: float) -> Iterator[Want]:
    """Replicas for the current and for the expected load."""
    level = known.traffic.level
    need, later = able.need(level), able.need(ahead)
    yield need, Reason.LOAD, f"{level:,.0f} tokens/s need {need}"
    yield later, Reason.FORECAST, f"{ahead:,.0f} tokens/s are expected in {known.lead_s:.0f} s and need {later}"


def _full_s(learned: Learned, reading: Reading, current: int) -> float:
    """The updated `Learned.full_s`; 0 while a desired replica is not ready."""
    if reading.pending or not reading.ready or reading.ready < current:
        return 0.0
    full = reading.waiting > 0 and reading.busy is not None and reading.busy >= FULL
    some_s = min(reading.since_s, FULL_S / 2)
    return min(learned.full_s + some_s, FULL_S) if full else max(learned.full_s - some_s, 0.0)


def _crowded(known: Learned, reading: Reading) -> Iterator[Want]:
    """Replicas for serving all at once, if only the queue and full replicas are known."""
    if known.capacity.rate > 0 or known.full_s < FULL_S:
        return
    ready, waiting = reading.ready, reading.waiting
    each = max(known.traffic.in_flight / ready, 1.0)
    need = min(math.ceil(ready + waiting / each), ready * FULL_TIMES)
    full = "the one replica is full" if ready == 1 else f"all {ready} replicas are full"
    yield need, Reason.PANIC, f"requests have waited for {FULL_S:.0f} s, {waiting} now, and {full}: trying {need}"


def _trouble(known: Learned, able: Capacity, before: Traffic, reading: Reading, load: float) -> Iterator[Want]:
    """Replicas for a sudden overload, or for a queue."""
    flow = known.traffic
    heavy = before.level / before.requests if before.requests > 0 else 0.0
    noise = NOISE * heavy * math.sqrt(before.requests / SHORT_S)
    placed = reading.ready + reading.pending
    if known.capacity.rate <= 0 or not placed:
        return  # no capacity measured yet, or the first replica is still starting
    panic = flow.short - flow.level > noise and flow.short > able.of(placed) * PANIC
    backlog = _backlog(known, able, reading, reading.waiting * heavy)
    if panic or backlog > 0:
        need = able.need((max(flow.short, load) if panic else load) + backlog / DRAIN_S)
        why = f"{flow.short:,.0f} tokens/s arrive at once, and {backlog:,.0f} tokens will be queued"
        yield need, Reason.PANIC, f"{why}: {need} work them off in {DRAIN_S:.0f} s"


def _spare(known: Learned, able: Capacity, now: float, wanted: int, current: int) -> Wish:
    """Fewer replicas, if they suffice, with a margin, for the expected load until others could be ready again."""
    flow, error = known.traffic, known.season.ways[season.best(known.season)].error
    margin = 1 + min(max(error, SPARE_MIN), SPARE_MAX)
    times = (0.5, 1.0, 1.5, 2.0)
    most = max(
        season.forecast(known.season, flow.level, flow.slope(), (known.lead_s + AHEAD_S) / 2 * part, now)
        for part in times
    )
    most = max(most, flow.level) * margin
    need, crowd = able.need(most), _crowd(known).need(flow.in_flight * margin)
    least = min(max(need, crowd, wanted), current)
    if crowd > need:
        return Wish(least, Reason.SPARE, f"{flow.in_flight:.3g} requests in flight need {crowd}")
    return Wish(least, Reason.SPARE, f"{most:,.0f} tokens/s are the most to expect, for which {need} suffice")


def _able(known: Learned, reading: Reading) -> Capacity:
    """The capacity, at least that of a replica without concurrency: more replicas would not make that faster.

    If overload was never observed, with an assumed concurrency. If none is ready, the earlier values hold: the low
    load of many replicas does not show how much the first one can serve.
    """
    able, flow = known.capacity, known.traffic
    if reading.ready and flow.in_flight > 0:
        each = flow.level / flow.in_flight
    elif able.rate > 0 and known.alone_s > 0:
        each = 1 / known.alone_s
    else:
        return able
    return able._replace(rate=max(able.rate, each * (1.0 if able.known else AT_ONCE)))


def _crowd(known: Learned) -> Capacity:
    """The same in concurrent requests."""
    return known.crowd._replace(rate=max(known.crowd.rate, 1.0 if known.crowd.known else AT_ONCE))


def _backlog(known: Learned, able: Capacity, reading: Reading, waiting: float) -> float:
    """The queue, in work, by the time another replica could be ready, if more than a second's work waits now.

    Pending replicas will have worked for half of that time on average.
    """
    flow = known.traffic
    if waiting <= flow.level:
        return 0.0
    ready, placed = able.of(reading.ready) if reading.ready else 0.0, able.of(reading.ready + reading.pending)
    lacking = (max(flow.short, flow.level) - (ready + placed) / 2) * known.lead_s
    return min(max(waiting + lacking, 0.0), BACKLOG_S * max(flow.short, flow.level))


def _study(scale: Scale, known: Learned, reading: Reading, now: float) -> Learned:
    """Update the statistics of late responses at the current load."""
    flow, load = known.traffic, traffic.peak(known.traffic)
    if flow.requests * LEVEL_S >= ALONE_MIN and flow.seen_s >= LEVEL_S and reading.waiting == 0:
        each_s = flow.in_flight / flow.level
        known = replace(known, alone_s=min(known.alone_s or each_s, each_s))
    if reading.ready == 0:
        return replace(known, asleep_at=now)
    strain, late = _strain(scale, known, reading), 0.0
    if strain is not None and reading.completions and now - known.asleep_at > LEVEL_S:
        late, many = strain, reading.completions
        crowd = flow.in_flight / reading.ready
        known = replace(
            known,
            cells=capacity.with_responses(known.cells, reading.ready, load, many, late) if load > 0 else known.cells,
            crowds=capacity.with_responses(known.crowds, reading.ready, crowd, many, late)
            if crowd > 0
            else known.crowds,
        )
        kept = math.exp(-reading.since_s / SPENT_S)
        known = replace(known, answers=known.answers * kept + many, strained=known.strained * kept + many * late)
    part = -math.expm1(-reading.since_s / LEVEL_S)
    known = replace(known, strain=known.strain + (late - known.strain) * part)
    if now - known.fitted_at >= FIT_EVERY_S and known.cells:
        spent = known.strained / max(known.answers, 1e-9) - known.anyway
        edge = min(max(EDGE * AIM / max(spent, 1e-9), EDGES[0]), EDGES[1])
        anyway = capacity.unloaded(known.cells)
        since = (known.alike_since or now) if anyway else 0.0
        anyway = anyway if now - since >= ALIKE_S else 0.0
        able = capacity.fit(known.cells, edge, anyway=anyway)
        crowds = capacity.fit(known.crowds, edge, (able.free,), anyway)
        known = replace(known, capacity=able, crowd=crowds, anyway=anyway, alike_since=since, fitted_at=now)
    return known


def _strain(scale: Scale, known: Learned, reading: Reading) -> float | None:
    """How late responses are, as a multiple of what is allowed; None: unknown."""
    if reading.late is not None and (scale.ttft_s or scale.tpot_s):
        return reading.late / max(reading.completions, 1) / GOAL
    parts = []
    if scale.ttft_s and reading.ttft_s is not None:
        parts.append(reading.ttft_s / (scale.ttft_s * TTFT_PART))
    if scale.tpot_s and reading.tpot_s is not None:
        parts.append(reading.tpot_s / (scale.tpot_s * TPOT_PART))
    flow = known.traffic
    if not (scale.ttft_s or scale.tpot_s) and known.alone_s > 0 and flow.level > 0:
        if flow.in_flight <= reading.ready:
            parts.append(0.0)  # one at a time on average: more replicas would not make them faster
        elif scale.latency_s:
            parts.append(flow.in_flight / max(flow.requests, 1e-9) / (scale.latency_s * LATENCY_PART))
        else:
            parts.append(flow.in_flight / flow.level / (known.alone_s * LONGER))
    return max(parts) * EDGE if parts else None
