"""One policy on one workload: what came of it."""

from functools import lru_cache
from typing import Final, NamedTuple

from cells import WORKS, answers, cluster, ours, rule

from forebay.core.scaling.settings import Policy
from forebay.sim.engine import Start, hardware, start_s
from forebay.sim.fleet.fleet import Fleet
from forebay.sim.fleet.response import GRADES
from forebay.sim.fleet.sizers import ATTAINMENT, PERIOD_S, Planned, Scaler, ahead, needed, part, peak
from forebay.sim.fleet.values import FleetResult, Load, Sizer

FIGURES: Final = ("attainment", "replica_hours", "refused", "turns_per_hour", "started", "most")
RULES: Final = ("hpa", "kpa", "apa", "slo")
TRIED: Final = (0.35, 0.5, 0.7, 1.0)
"""Targets of rivals, as shares of what a replica of sixteen has under way when it just keeps the promise."""
FLEET: Final = 16
SLOW: Final = 1.2
"""What nine of ten starts do not take longer than, of the median."""


class Job(NamedTuple):
    """One run."""

    work: str
    scale: float
    start_s: float
    """0: with the weights on a local disk."""
    policy: str
    seed: int
    target: float

    @property
    def cell(self) -> str:
        """As in results.json."""
        start = f", start {self.start_s:g} s" if self.start_s else ""
        tuning = f" @{self.target:g}" if self.seed >= 100 else ""
        return f"{self.work} x{self.scale:g}{start}{tuning}"


def measured(job: Job) -> tuple[Job, list[float]]:
    """Do one run."""
    load, replicas = _load(job.work, job.seed), answers(job.work, job.scale)
    took_s = job.start_s or local_s()
    begin = needed(part(load, 0, round(PERIOD_S / load.tick_s)), replicas)[0]
    match job.policy:
        case "static":
            need = _need(job.work, job.scale, job.seed)
            begin = peak(load, replicas, sorted(need)[len(need) * 9 // 10])
            sizer: Sizer | None = None
        case "oracle":
            sizer = Planned(ahead(_need(job.work, job.scale, job.seed), took_s * SLOW, load.tick_s))
        case "forebay":
            sizer = Scaler(ours())
        case name:
            sizer = Scaler(rule(Policy(name), job.target or 1.0))
    result = Fleet(load, replicas, sizer, start_s=took_s, begin=begin, seed=job.seed).run()
    return job, figures(result, load)


def figures(result: FleetResult, load: Load) -> list[float]:
    """As FIGURES has them."""
    hours = len(load.arrivals) * load.tick_s / 3600
    return [
        float(f"{value:.5g}")
        for value in (
            result.attainment, result.replica_hours, result.refused / result.arrivals, len(result.turns) / hours,
            result.started, max(result.ready),
        )
    ]  # fmt: skip


def tuned(work: str, share: float) -> float:
    """A target for rivals."""
    replicas = answers(work, 1.0)
    kept = [grade for grade in range(GRADES + 1) if replicas.answer(FLEET, grade / GRADES).good[-1] >= ATTAINMENT]
    return float(f"{share * replicas.answer(FLEET, max(kept) / GRADES).in_flight:.3g}")


def local_s() -> float:
    """What a start takes with the image and the weights on a local disk."""
    used = cluster(1.0)
    return start_s(hardware(used.gpu, used.model, used.tensor_parallel, used.precision), Start.LOCAL)


@lru_cache(2)
def _load(work: str, seed: int) -> Load:
    return WORKS[work].load(seed)


@lru_cache(2)
def _need(work: str, scale: float, seed: int) -> list[int]:
    return needed(_load(work, seed), answers(work, scale))
