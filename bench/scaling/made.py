"""Made loads that each show one thing: no need to change, a sudden need, nothing to see, things that break."""

from collections.abc import Collection, Iterator
from itertools import pairwise
from random import Random
from typing import Final

import numpy as np
from cells import WORKS, answers, ours, rule
from trial import RULES, Job, local_s, tuned

from forebay.core.scaling.settings import Policy
from forebay.sim.fleet import loads
from forebay.sim.fleet.fleet import Fleet
from forebay.sim.fleet.response import Response
from forebay.sim.fleet.sizers import Scaler, needed
from forebay.sim.fleet.values import FleetFaults, FleetResult, Load

WEEK, DAY = "azure-week", "servegen-day"
CONSTANT_PER_S: Final = (3.0, 12.0, 25.0, 50.0)
CONSTANT_HOURS: Final = 6.0
STEP_PER_S, STEP_TIMES, STEP_AT_S, STEP_UNTIL_S = 6.0, 5.0, 3 * 3600.0, 4 * 3600.0
GOOD: Final = 0.99
BACK_S: Final = 60.0
"""For so long the share of good answers must be as promised to be back."""
OUTAGES: Final = tuple([(hour * 3600.0, hour * 3600.0 + 1200.0) for hour in range(1, 24, 2)])
"""Twenty minutes without any reading, every two hours of the day."""
MTBF_S: Final = 24 * 3600.0
"""Of one replica: far worse than real ones."""
LATE_PER_S, LATE_HOURS, LATE = 25.0, 4.0, 0.02
"""A constant load of which such a share is late on any number of replicas."""
CELLS: Final = (*[f"constant {rate:g}/s" for rate in CONSTANT_PER_S], "step", "outages", "failures", "late")
SEEDS: Final = (1, 2, 3)


def made(targets: dict[str, dict[str, float]], policies: Collection[str]) -> Iterator[Job]:
    """One run for each cell, policy and seed."""
    for cell in CELLS:
        for seed in SEEDS:
            for policy in ("forebay", *RULES):
                if policy in policies:
                    yield Job(cell, 1.0, 0.0, policy, seed, targets[_work(cell)].get(policy, 0.0))


def shown(job: Job) -> tuple[Job, list[float]]:
    """Attainment, replica hours, and the figure of the cell: see there."""
    kind = job.work.split()[0]
    mix = tuple(WORKS[_work(job.work)].mix())
    faults = FleetFaults()
    if kind == "constant":
        load = loads.constant(float(job.work.split()[1].removesuffix("/s")), CONSTANT_HOURS, mix, job.seed)
    elif kind == "step":
        load = loads.step(STEP_PER_S, STEP_TIMES, mix, job.seed, at_s=STEP_AT_S, until_s=STEP_UNTIL_S)
    elif kind == "late":
        load = loads.constant(LATE_PER_S, LATE_HOURS, mix, job.seed)
    else:
        load = loads.day(job.seed)
        faults = (
            FleetFaults(outages=OUTAGES) if kind == "outages" else FleetFaults(failures_s=_failures(load, job.seed))
        )
    replicas = answers(_work(job.work), 1.0)
    scale = ours() if job.policy == "forebay" else rule(Policy(job.policy), job.target or tuned(_work(job.work), 1.0))
    begin = needed(_beginning(load), replicas)[0]
    if kind == "late":
        replicas = _late(replicas)
    fleet = Fleet(load, replicas, Scaler(scale), start_s=local_s(), begin=begin, seed=job.seed, faults=faults)
    result = fleet.run()
    figure = FIGURES[kind](result, load)
    return job, [float(f"{value:.5g}") for value in (result.attainment, result.replica_hours, figure)]


def _late(replicas: Response) -> Response:
    """Replicas of which a share of the answers is late, however little there is to do."""
    worse = [
        tuple([each._replace(good=tuple([good * (1 - LATE) for good in each.good])) for each in row])
        for row in replicas.answers
    ]
    return replicas._replace(answers=tuple(worse))


def _work(cell: str) -> str:
    """Whose requests they are."""
    return DAY if cell in {"outages", "failures"} else WEEK


def _beginning(load: Load) -> Load:
    """The first ten minutes, by which the fleet is sized at the beginning."""
    ticks = int(600 / load.tick_s)
    return Load(load.name, load.tick_s, load.arrivals[:ticks], load.prompt_tokens[:ticks], load.output_tokens[:ticks])


def _turns(result: FleetResult, load: Load) -> float:
    """Changes of direction in an hour; the first one does not count, in which a fleet finds its size."""
    hours = len(load.arrivals) * load.tick_s / 3600 - 1
    return len([at for at in result.turns if at > 3600]) / hours


def _back_s(result: FleetResult, load: Load) -> float:
    """From the step until the share of good answers is back for a minute."""
    first, span = int(STEP_AT_S / load.tick_s), int(BACK_S / load.tick_s)
    arrivals = np.array(load.arrivals)
    for at in range(first, len(arrivals) - span):
        if np.average(result.shares[at : at + span], weights=arrivals[at : at + span] + 1e-9) >= GOOD:
            return (at - first) * load.tick_s
    return float("inf")


def _replicas(result: FleetResult, load: Load) -> float:
    """On the mean."""
    return result.replica_hours / (len(load.arrivals) * load.tick_s / 3600)


def _down_in_outages(result: FleetResult, load: Load) -> float:
    """How often fewer were wanted while nothing was known."""
    count = 0
    for begin, end in OUTAGES:
        wanted = result.wanted[int(begin / load.tick_s) - 1 : int(end / load.tick_s)]
        count += sum(after < before for before, after in pairwise(wanted))
    return float(count)


def _failures(load: Load, seed: int) -> tuple[float, ...]:
    """Of ten replicas, whatever there are."""
    rng, at, until = Random(seed), 0.0, len(load.arrivals) * load.tick_s
    found = []
    while (at := at + rng.expovariate(10 / MTBF_S)) < until:
        found.append(at)
    return tuple(found)


FIGURES: Final = {
    "constant": _turns, "step": _back_s, "outages": _down_in_outages, "failures": _turns, "late": _replicas,
}  # fmt: skip
"""What is told of each kind of cell."""
