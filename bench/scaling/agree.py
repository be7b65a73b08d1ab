"""How far a fleet is from a full replay of the same requests, with a number of replicas that does not change."""

from typing import Final

from cells import WORKS, answers, cluster
from trial import Job

from forebay.sim.fleet.fleet import Fleet
from forebay.sim.fleet.loads import requests, ticks
from forebay.sim.fleet.sizers import part
from forebay.sim.replay.outcome import Slo, summary
from forebay.sim.replay.run import replay

PIECES: Final = {"azure-week": (158 * 3600.0, 720.0), "servegen-day": (5700.0, 300.0)}
"""From when on, and for how long: where both climb most."""
COUNTS: Final = {"azure-week": (14, 18), "servegen-day": (15, 20)}
AGREE: Final = [Job(work, 1.0, 0.0, str(count), 1, 0.0) for work, counts in COUNTS.items() for count in counts]
"""The policy is the number of replicas."""


def agreement(job: Job) -> tuple[Job, list[float]]:
    """Attainment in the replay, then in the fleet."""
    work, (from_s, for_s), count = WORKS[job.work], PIECES[job.work], int(job.policy)
    load = work.load(job.seed)
    piece = part(load, int(from_s / load.tick_s), int((from_s + for_s) / load.tick_s))
    workload = requests(piece, tuple(work.mix()), job.seed)
    used = cluster(job.scale).model_copy(update={"replicas": count})
    found = summary(replay(workload, used, policy="cpr", seed=job.seed), Slo(used.slo.ttft_s, used.slo.tpot_s))
    fleet = Fleet(ticks(workload, load.tick_s), answers(job.work, job.scale), None, start_s=0.0, begin=count)
    return job, [float(f"{value:.5g}") for value in (found.goodput, fleet.run().attainment)]
