"""The fleet: requests in shares of ticks, replicas that are ordered, start, serve, fail and go.

What waits is one queue, first come, first served, as if any replica could take what another one holds; what that and
the ticks cost in truth is measured against replays (`bench/scaling`). What is served meets what `response` has
measured for the load of that moment, after its wait. Who has waited for longer than `QUEUE_S` is refused. Nothing is
predicted, and GPUs are not counted: a rule on such a signal keeps what there is.
"""

from collections import deque
from random import Random
from typing import Final

from forebay.core.scaling.values import Reading
from forebay.sim.fleet.response import STEPS, Answer, Response
from forebay.sim.fleet.values import CALM, Load, Sizer, Story, Weather

QUEUE_S: Final = 60.0
"""As `queue_timeout` of a cluster file."""
SMOOTH_S: Final = 10.0
"""Over which a load is averaged before it is looked up: the chance within it is in the answers already."""
EPOCH_S: Final = 1_715_299_200.0
"""The clock at the beginning of a story: 10 May 2024, 0:00 UTC, a Friday, as that of the Azure week."""
STARTS_KEPT: Final = 20
SPREAD: Final = 0.15
"""Of the time that a start takes: log-normal, so that one in ten takes 1.2 times the median."""


class Fleet:
    """One model's replicas through one load; without anybody who sizes it there are always as many."""

    __slots__ = (
        "_answer", "_load", "_part", "_pending", "_queue", "_ready", "_response", "_rng", "_sizer", "_slow_s",
        "_start_s", "_starts_s", "_story", "_usage", "_wait_s", "_wanted", "_way", "_weather", "_work",
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
        weather: Weather = CALM,
    ) -> None:
        self._load = load
        self._response = response
        self._sizer = sizer
        self._rng = Random(seed)  # noqa: S311 - chance that can be repeated
        self._weather = weather
        self._start_s = start_s
        self._starts_s = [start_s] * STARTS_KEPT
        """What the last ones took."""
        self._slow_s = start_s
        """Their 90th percentile."""
        self._ready = self._wanted = begin
        self._pending: list[tuple[float, float]] = []
        """When each will be ready, and how long that will have taken."""
        self._queue: deque[list[float]] = deque()
        """Of each tick of which some wait: when it began, requests, their work."""
        self._work = 0.0
        """That waits."""
        self._usage = 0.0
        self._part = 0.0
        """Of a late answer, that is not in a reading yet: these count whole ones."""
        self._wait_s = 0.0
        self._way = 0
        self._answer: Answer = response.answer(max(1, begin), 0.0)
        self._story = Story()

    def run(self) -> Story:
        """From the first tick to the last."""
        load, story, response = self._load, self._story, self._response
        tick_s = load.tick_s
        failures, outages, sizer = deque(self._weather.failures_s), self._weather.outages, self._sizer
        rows = zip(load.arrivals, load.prompt_tokens, load.output_tokens, strict=True)
        for at, (arrivals, prompt_tokens, output_tokens) in enumerate(rows):
            now = at * tick_s
            self._arrive(now)
            while failures and failures[0] <= now:
                failures.popleft()
                self._fail(now)
            story.arrivals += arrivals
            work = prompt_tokens * response.prompt_token + output_tokens * response.output_token
            waited = len(self._queue) > 0
            self._queue.append([now, arrivals, work])
            self._work += work
            late = story.late
            served, refused = self._serve(now, tick_s, waited)
            late = story.late - late
            story.replica_s += (self._ready + len(self._pending)) * tick_s
            story.ready.append(self._ready)
            if sizer is None:
                continue
            reading = self._reading(now + tick_s, (arrivals, prompt_tokens, output_tokens), served, late, refused)
            known = not any(begin <= now < end for begin, end in outages)
            self._resize(sizer.size(reading if known else None, reading.at, self._wanted), now + tick_s)
            story.wanted.append(self._wanted)
        story.open = sum([each[1] for each in self._queue])
        return story

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
        self._story.started += 1

    def _fail(self, now: float) -> None:
        if self._ready:
            self._ready -= 1
            self._order(now)

    def _resize(self, wanted: int, now: float) -> None:
        """Those that are not ready yet go first, the newest of them before the others."""
        change = wanted - self._wanted
        if not change:
            return
        way = 1 if change > 0 else -1
        story = self._story
        if way == -self._way:
            story.turns.append(now)
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
        """Serve what a tick has time for; how many were answered, and refused."""
        story, queue, response, ready = self._story, self._queue, self._response, self._ready
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
        story.good += good
        story.late += served - good
        story.refused += refused
        ended = served + refused
        story.shares.append(good / ended if ended else 1.0)
        return served, refused

    def _reading(
        self, at: float, came: tuple[float, float, float], served: float, late: float, refused: float
    ) -> Reading:
        """What is seen of a tick in which so many requests and tokens came."""
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
