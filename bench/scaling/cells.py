"""What is measured: workloads, step times, starts, and who decides."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from forebay.core.scaling.settings import Pace, Policy, Scale
from forebay.sim.fleet import loads
from forebay.sim.fleet.response import Measured, Mix, Response, measured, response
from forebay.sim.fleet.values import Load
from forebay.sim.replay.cluster import SimCluster

RESPONSES: Final = Path(__file__).parent / "responses.json"
SCALES: Final = (0.8, 1.0, 1.25)
"""Of step times."""
SEEDS: Final = (1, 2, 3, 4, 5)
REPLICAS_MAX: Final = 96


class Work(NamedTuple):
    """A workload."""

    load: Callable[[int], Load]
    mix: Callable[[], Mix]


WORKS: Final = {"azure-week": Work(loads.week, loads.week_mix), "servegen-day": Work(loads.day, loads.day_mix)}


def cluster(scale: float) -> SimCluster:
    """70B in BF16 on four H100, with steps that take `scale` times as long; 5 s and 0.1 s are promised."""
    return SimCluster(speeds=(1 / scale,))


@cache
def answers(work: str, scale: float) -> Response:
    """How replicas answer; measured if it is not known."""
    known = json.loads(RESPONSES.read_text()) if RESPONSES.exists() else {}
    key = f"{work} x{scale:g}"
    mix = WORKS[work].mix()
    if key not in known:
        known[key] = measured(cluster(scale), mix)
        known = dict(sorted(known.items()))
        rows = [f"{json.dumps(name)}: {json.dumps(found, separators=(',', ':'))}" for name, found in known.items()]
        RESPONSES.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    return response(cluster(scale), mix, Measured(*known[key]))


def rule(policy: Policy, target: float) -> Scale:
    """Another system's rule as it is published, without what we would put around it."""
    return Scale(
        REPLICAS_MAX, policy=policy, target=target, limits=(), down=Pace(0.0), ttft_s=cluster(1.0).slo.ttft_s,
        tpot_s=cluster(1.0).slo.tpot_s,
    )  # fmt: skip


def ours() -> Scale:
    """All that a user writes: `scale: {max: 96}`, and the promise."""
    promise = cluster(1.0).slo
    return Scale(REPLICAS_MAX, ttft_s=promise.ttft_s, tpot_s=promise.tpot_s)
