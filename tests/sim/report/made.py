"""A made-up replay report."""

from forebay.sim.load.describe import Description, Spread
from forebay.sim.replay.cluster import SimCluster
from forebay.sim.replay.outcome import Summary
from forebay.sim.report.curves import Curves
from forebay.sim.report.facts import Scope
from forebay.sim.report.figures import Result, rows
from forebay.sim.report.page import Report

LOAD = Description(12_031, 3540.0, 3.4, 1.02, Spread(6909, 39550, 12035), Spread(350, 698, 343), 0.374, 0)
CURVES = Curves(
    ((0.1, 0.5), (2.0, 1.0)),
    ((0.02, 1.0),),
    ((0.0, 3.0), (60.0, 4.0)),
    ((0.0, 3.0), (60.0, 2.0)),
    (9_000_000, 5_000_000),
    ((0.0, 3.0), (60.0, 5.0)),
)


def summary_of(goodput: float, ttft_s: float = 1.0, refused: dict[str, int] | None = None) -> Summary:
    times = (ttft_s, ttft_s * 2, ttft_s * 3)
    return Summary(
        requests=100,
        goodput=goodput,
        goodput_per_s=goodput * 10,
        ttft_mean_s=ttft_s,
        ttft_s=times,
        tpot_s=times,
        e2e_s=times,
        cache_hit=0.2,
        imbalance=1.1,
        busy=0.5,
        refused=refused or {},
        preemptions=0,
        replica_hours=2.0,
        lasted_s=10.0,
    )


def report_of(
    seeds: int = 1, scales: tuple[float, ...] = (1.0,), workload: str = "mooncake", fleets: tuple[str, ...] = ()
) -> Report:
    """Of two policies, or of one and two fleets."""
    policies = fleets or ("cpr", "random")
    results = [
        Result(
            "cpr" if fleets else policy,
            scale,
            seed,
            summary_of(0.9 - 0.3 * at + 0.01 * seed, refused={"queue_timeout": 7, "cut_off": 1} if at else None),
            policy if fleets else "",
        )
        for seed in range(seeds)
        for scale in scales
        for at, policy in enumerate(policies)
    ]
    scope = Scope(workload, LOAD, policies, tuple(range(seeds)), scales, fleets)
    curves = dict.fromkeys(policies, CURVES)
    return Report(
        scope, SimCluster(), rows(results, SimCluster()), curves, "", f"forebay simulate --trace {workload}"
    )
