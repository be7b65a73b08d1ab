"""Latency of replicas as a function of load: measured once in replays with the real gateway, then looked up by
fleets.

For a grid of loads and fleet sizes, Poisson arrivals from a mix of requests are replayed for a minute, and what
clients see is recorded. Load 1 is the throughput of a replica that always has work. Between grid points, values are
interpolated linearly.
"""

from array import array
from collections.abc import Iterator, Sequence
from random import Random
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.sim.engine import EngineEvent, Hardware, Job, Kind, Replica, hardware
from forebay.sim.load.columns import Columns
from forebay.sim.load.values import Workload
from forebay.sim.replay.cluster import SimCluster
from forebay.sim.replay.outcome import Outcome
from forebay.sim.replay.run import replay

LOADS: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SIZES: Final = (1, 2, 4, 16)
"""Measured fleet sizes: larger fleets allow better routing choices."""
SPAN_S: Final = 60.0
"""Duration of each measurement, after a warm-up of a fifth of it: near saturation a queue would grow without end, and
growth over minutes is simulated by the fleet."""
REQUESTS_MIN: Final = 1500
STEPS: Final = 25
"""Steps into which the TTFT up to the objective is divided."""
GRADES: Final = 100
"""Steps into which the load is divided."""
FULL_REQUESTS: Final = 1500
SEED: Final = 20_240_511
POLICY: Final = "cpr"
Mix = Sequence[tuple[int, int]]
"""Requests to draw from: prompt tokens and output tokens."""
Floats = npt.NDArray[np.float64]


class Answer(NamedTuple):
    """Latency and utilisation of a fleet at one load."""

    good: tuple[float, ...]
    """Share with TTFT within k/STEPS of the objective, and TPOT within its objective."""
    in_flight: float
    """Requests in flight per replica."""
    kv_use: float
    busy: float
    """Share of the time."""
    ttft_s: float
    """90th percentile."""
    tpot_s: float
    """90th percentile."""


class Response(NamedTuple):
    """The response of a cluster's replicas for a mix of requests and an objective."""

    ttft_s: float
    """The TTFT objective."""
    prompt_token: float
    output_token: float
    """Work of a prompt token, and of an output token, as a share of a mean request's work."""
    requests_per_s: float
    """Requests of mean work that a saturated replica finishes per second."""
    room: int
    """Most requests in a replica; more wait in gateways."""
    answers: tuple[tuple[Answer, ...], ...]
    """By number of replicas (the last entry applies to all larger fleets), and load in GRADES."""

    def answer(self, replicas: int, load: float) -> Answer:
        """The values at a load of 0..1 per replica, for at least one replica."""
        return self.answers[min(replicas, len(self.answers)) - 1][min(int(load * GRADES + 0.5), GRADES)]


class Measured(NamedTuple):
    """The measurements, for storage; the rest is derived from them."""

    requests_per_s: float
    points: list[list[list[float]]]
    """By SIZES and LOADS: the fields of an `Answer`, flattened."""


def measured(cluster: SimCluster, mix: Mix) -> Measured:
    """Measure it; takes about a minute and is deterministic. `cluster.replicas` does not matter."""
    full_per_s = _full(_hardware(cluster), cluster, mix)
    return Measured(
        full_per_s,
        [[_point(cluster, mix, size, load * full_per_s) for load in LOADS] for size in SIZES],
    )


def response(cluster: SimCluster, mix: Mix, found: Measured) -> Response:
    """Interpolate for all loads and sizes."""
    row = _hardware(cluster)
    prompt = float(np.mean([prompt for prompt, _ in mix]))
    output = float(np.mean([output for _, output in mix]))
    prompt_s = row.step.step_s(2048, 2048 * 1024, 0, 0) / 2048
    output_s = row.step.step_s(64, 0.0, int(64 * (prompt + output / 2)), 64) / 64
    mean_s = prompt * prompt_s + output * output_s
    kv_tokens = row.kv_tokens if cluster.kv_tokens is None else cluster.kv_tokens
    grid = np.array([[_idle(points[0]), *points] for points in found.points])
    return Response(
        cluster.slo.ttft_s, prompt_s / mean_s, output_s / mean_s, found.requests_per_s,
        min(cluster.sequences_max, int(kv_tokens / (prompt + output))),
        tuple(tuple(_answer(each) for each in _between(grid, size)) for size in range(1, SIZES[-1] + 1)),
    )  # fmt: skip


def _hardware(cluster: SimCluster) -> Hardware:
    return hardware(cluster.gpu, cluster.model, cluster.tensor_parallel, cluster.precision)


def _full(row: Hardware, cluster: SimCluster, mix: Mix) -> float:
    """Requests that a replica finishes per second while many wait: between the first and last fifth of them."""
    replica, rng = Replica(row, speed=cluster.speeds[0]), Random(SEED)  # noqa: S311 - chance that can be repeated
    for id in range(FULL_REQUESTS):
        replica.offer(Job(id, *rng.choice(mix)), 0.0)
    ended = [event.at for event in _events(replica) if event.kind is Kind.DONE]
    first, last = FULL_REQUESTS // 5, FULL_REQUESTS * 4 // 5
    return (last - first) / (ended[last] - ended[first])


def _events(replica: Replica) -> Iterator[EngineEvent]:
    while replica.next_at < float("inf"):
        yield from replica.advance(replica.next_at)


def _point(cluster: SimCluster, mix: Mix, size: int, each_per_s: float) -> list[float]:
    rng = Random(SEED + size)  # noqa: S311
    rate_per_s = each_per_s * size
    span_s = max(SPAN_S, REQUESTS_MIN / rate_per_s) * 1.2
    at_s, prompts, outputs = array("d"), array("i"), array("i")
    now = rng.expovariate(rate_per_s)
    while now < span_s:
        prompt, output = rng.choice(mix)
        at_s.append(now)
        prompts.append(prompt)
        outputs.append(output)
        now += rng.expovariate(rate_per_s)
    outcome = replay(
        Workload("one load", Columns(at_s, prompts, outputs)),
        cluster.model_copy(update={"replicas": size}),
        policy=POLICY,
    )
    return _met(outcome, cluster, each_per_s, span_s)


def _met(outcome: Outcome, cluster: SimCluster, each_per_s: float, span_s: float) -> list[float]:
    arrived, first, ended = (np.array(each) for each in (outcome.arrived_at, outcome.first_at, outcome.ended_at))
    prompt, output = np.array(outcome.prompt_tokens), np.array(outcome.output_tokens)
    counts = arrived >= span_s / 6
    ttft, lasted = (first - arrived)[counts], (ended - arrived)[counts]
    tpot = ((ended - first) / np.maximum(output - 1, 1))[counts]
    steady = tpot <= cluster.slo.tpot_s
    good = [float(np.mean(steady & (ttft <= cluster.slo.ttft_s * step / STEPS))) for step in range(STEPS + 1)]
    kv_tokens = cluster.kv_tokens or _hardware(cluster).kv_tokens
    kv = each_per_s * float(np.mean(lasted * (prompt + output / 2)[counts])) / kv_tokens
    busy = sum([each.busy_s for each in outcome.replicas]) / (len(outcome.replicas) * span_s)
    p90 = [float(np.nanpercentile(each, 90)) for each in (ttft, tpot)]
    found = [*good, each_per_s * float(np.nanmean(lasted)), min(1.0, kv), min(1.0, busy), *p90]
    return [float(f"{each:.4g}") for each in found]


def _idle(least: Sequence[float]) -> list[float]:
    """Values for zero load: the latencies of the lowest load, and nothing in flight."""
    return [*least[: STEPS + 1], 0.0, 0.0, 0.0, *least[STEPS + 4 :]]


def _answer(row: Floats) -> Answer:
    good, rest = row[: STEPS + 1].tolist(), row[STEPS + 1 :].tolist()
    return Answer(tuple(good), *rest)


def _between(grid: Floats, size: int) -> Floats:
    """The rows of one fleet size, at all loads."""
    place = float(np.interp(np.log2(size), np.log2(SIZES), np.arange(len(SIZES))))
    low = int(place)
    near = grid[low] + (grid[min(low + 1, len(SIZES) - 1)] - grid[low]) * (place - low)
    loads = np.arange(GRADES + 1) / GRADES
    return np.column_stack([np.interp(loads, (0.0, *LOADS), column) for column in near.T])
