"""The fleet: fractional requests per tick, and replicas that are ordered, start, serve, fail and stop.

Requests wait in a single FIFO queue, as if any replica could take what another one has queued; `bench/scaling`
measures the error of this and of the ticks against replays. Served requests get the latency that `response` measured
for the current load, after their wait. Requests that waited longer than `QUEUE_S` are rejected. Nothing is predicted,
and GPUs are not counted: a rule on such a signal keeps the current size.
"""

from collections import deque
from random import Random
from typing import Final

from forebay.core.scaling.values import Reading
from forebay.sim.fleet.response import STEPS, Answer, Response
from forebay.sim.fleet.values import CALM, FleetFaults, FleetResult, Load, Sizer

QUEUE_S: Final = 60.0
"""As `queue_timeout_s` of the cluster file."""
SMOOTH_S: Final = 10.0
"""Smoothing of the load before it is looked up: random variation is already in the measured responses."""
EPOCH_S: Final = 1_715_299_200.0
"""Wall clock at the start: 10 May 2024, 0:00 UTC, a Friday, as in the Azure week."""
STARTS_KEPT: Final = 20
SPREAD: Final = 0.15
"""Sigma of log-normal start times: one in ten takes 1.2 times the median."""


class Fleet:
    """One model's replicas under one load; without a sizer their number is constant."""

    __slots__ = (
        "_answer", "_faults", "_load", "_part", "_pending", "_queue", "_ready", "_response", "_result", "_rng",
        "_sizer", "_slow_s", "_start_s", "_starts_s", "_usage", "_wait_s", "_wanted", "_way", "_work",
    )  # fmt: skip

    def __init__(
        self,
        load: Load,
        response: Response,
        sizer: Sizer | None,
        *,
        start_s: float,
        begin: int = 1,
        seed: int = 0,
        faults: FleetFaults = CALM,
    ) -> None:
        self._load = load
        self._response = response
        self._sizer = sizer
        self._rng = Random(seed)  # noqa: S311 - chance that can be repeated
        self._faults = faults
        self._start_s = start_s
        self._starts_s = [start_s] * STARTS_KEPT
        """Durations of the last starts."""
        self._slow_s = start_s
        """Their 90th percentile."""
        self._ready = self._wanted = begin
        self._pending: list[tuple[float, float]] = []
        """When each will be ready, and its start time."""
        self._queue: deque[list[float]] = deque()
        """For each tick with waiting requests: its start, requests, and work."""
        self._work = 0.0
        """Queued work."""
        self._usage = 0.0
        self._part = 0.0
        """Fraction of a late response not yet in a reading, as these count whole ones."""
        self._wait_s = 0.0
        self._way = 0
        self._answer: Answer = response.answer(max(1, begin), 0.0)
        self._result = FleetResult()

    def run(self) -> FleetResult:
        """Run all ticks."""
        load, result, response = self._load, self._result, self._response
        tick_s = load.tick_s
        failures, outages, sizer = deque(self._faults.failures_s), self._faults.outages, self._sizer
        rows = zip(load.arrivals, load.prompt_tokens, load.output_tokens, strict=True)
        for at, (arrivals, prompt_tokens, output_tokens) in enumerate(rows):
            now = at * tick_s
            self._arrive(now)
            while failures and failures[0] <= now:
                failures.popleft()
                self._fail(now)
            result.arrivals += arrivals
            work = prompt_tokens * response.prompt_token + output_tokens * response.output_token
            waited = len(self._queue) > 0
            self._queue.append([now, arrivals, work])
            self._work += work
            late = result.late
            served, refused = self._serve(now, tick_s, waited)
            late = result.late - late
            result.replica_s += (self._ready + len(self._pending)) * tick_s
            result.ready.append(self._ready)
            if sizer is None:
                continue
            reading = self._reading(now + tick_s, (arrivals, prompt_tokens, output_tokens), served, late, refused)
            known = not any(begin <= now < end for begin, end in outages)
            self._resize(sizer.size(reading if known else None, reading.at, self._wanted), now + tick_s)
            result.wanted.append(self._wanted)
        result.open = sum([each[1] for each in self._queue])
        return result

    # --- replicas

    def _arrive(self, now: float) -> None:
        pending = self._pending
        if not pending:
            return
        for ready_at, took_s in pending:
            if ready_at <= now:
                self._ready += 1
                self._starts_s = [*self._starts_s[1:], took_s]
                self._slow_s = sorted(self._starts_s)[int(0.9 * STARTS_KEPT)]
        self._pending = [each for each in pending if each[0] > now]

    def _order(self, now: float) -> None:
        took_s = self._start_s * self._rng.lognormvariate(0.0, SPREAD)
        self._pending.append((now + took_s, took_s))
        self._result.started += 1

    def _fail(self, now: float) -> None:
        if self._ready:
            self._ready -= 1
            self._order(now)

    def _resize(self, wanted: int, now: float) -> None:
        """Remove starting replicas first, the newest of them before the others."""
        change = wanted - self._wanted
        if not change:
            return
        way = 1 if change > 0 else -1
        result = self._result
        if way == -self._way:
            result.turns.append(now)
        self._way, self._wanted = way, wanted
        for _ in range(change):
            self._order(now)
        for _ in range(-change):
            if self._pending:
                self._pending.pop()
            else:
                self._ready -= 1

    # --- requests

    def _serve(self, now: float, tick_s: float, waited: bool) -> tuple[float, float]:
        """Serve what fits in a tick; returns how many were answered and rejected."""
        result, queue, response, ready = self._result, self._queue, self._response, self._ready
        speed = ready * response.requests_per_s
        most = speed * tick_s
        usage = min(1.0, self._work / most) if most else 1.0
        self._usage += (usage - self._usage) * min(1.0, tick_s / SMOOTH_S)
        answer = self._answer = response.answer(max(1, ready), 1.0 if usage >= 1.0 else self._usage)
        served = good = refused = done = wait_s = 0.0
        slo_s = response.ttft_s
        while queue and done < most:
            begun_at, requests, work = first = queue[0]
            part = 1.0 if work <= most - done else (most - done) / work
            some = requests * part
            if waited or work > most:
                wait_s = max(0.0, now + (done + work * part / 2) / speed - (begun_at + tick_s * part / 2))
            if wait_s < slo_s:
                good += some * answer.good[STEPS - int(wait_s / slo_s * STEPS)]
            served += some
            done += work * part
            if part < 1.0:
                first[1] -= some
                first[2] -= work * part
                break
            queue.popleft()
        self._work = max(0.0, self._work - done)
        while queue and queue[0][0] + QUEUE_S <= now:
            _, requests, work = queue.popleft()
            refused += requests
            self._work = max(0.0, self._work - work)
        self._wait_s = wait_s
        result.good += good
        result.late += served - good
        result.refused += refused
        ended = served + refused
        result.shares.append(good / ended if ended else 1.0)
        return served, refused

    def _reading(
        self, at: float, came: tuple[float, float, float], served: float, late: float, refused: float
    ) -> Reading:
        """The reading of a tick with these arrivals."""
        arrivals, prompt_tokens, output_tokens = came
        answer, ready, load = self._answer, self._ready, self._load
        queued = sum([each[1] for each in self._queue])
        running = answer.in_flight * ready if ready else 0.0
        held = max(0.0, self._response.room * ready - running)
        late += self._part
        self._part = late - int(late)
        return Reading(
            at=EPOCH_S + at,
            since_s=load.tick_s,
            ready=ready,
            pending=len(self._pending),
            arrivals=round(arrivals),
            prompt_tokens=round(prompt_tokens),
            completions=round(served),
            output_tokens=round(output_tokens * served / arrivals) if arrivals else 0,
            refused=round(refused),
            waiting=round(max(0.0, queued - held)),
            in_flight=running + queued,
            backlog_tokens=round(queued * prompt_tokens / arrivals) if arrivals else 0,
            kv_use=answer.kv_use if ready else None,
            busy=min(1.0, answer.in_flight / self._response.room) if ready else None,
            ttft_s=answer.ttft_s + self._wait_s if served else None,
            tpot_s=answer.tpot_s if served else None,
            duty=answer.busy if ready else None,
            cold_start_s=self._slow_s,
            late=int(late),
        )
