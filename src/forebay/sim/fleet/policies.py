"""Sizers of a fleet, by name: the product's own decisions, constant sizes, and an oracle that knows the load.

`peak` and `oracle` are planned in advance, from the requests by ticks and the replicas' measured response to these
requests (`response`): without the gateways' choices, and with a single unbounded cache. This ignores bursts within a
tick, so the plan is tried and enlarged until it meets the objective, or until more replicas would not help.
"""

from array import array
from collections.abc import Callable, Sequence
from math import ceil
from random import Random
from typing import Final, NamedTuple

from forebay.core.scaling.settings import Policy, Scale, ScaleSettings
from forebay.sim.engine import Start, hardware, start_s
from forebay.sim.fleet import loads
from forebay.sim.fleet.response import POLICY, Mix, Response, measured, response
from forebay.sim.fleet.sizers import ATTAINMENT, Planned, Scaler, ahead, needed, peak
from forebay.sim.fleet.values import Load
from forebay.sim.load.columns import Columns, columns
from forebay.sim.load.values import Workload
from forebay.sim.replay.changing import LOOK_S, Sizing
from forebay.sim.replay.cluster import SimCluster
from forebay.sim.replay.outcome import Slo, summary
from forebay.sim.replay.run import replay

STATIC: Final = "static"
PEAK: Final = "peak"
ORACLE: Final = "oracle"
NAMES: Final = (*[policy.value for policy in Policy], STATIC, PEAK, ORACLE)
HELD: Final = (Policy.HPA.value, Policy.KPA.value, Policy.APA.value)
"""Policies that keep a signal at a target."""
REPLICAS_MAX: Final = 256
USUAL: Final = ScaleSettings(max=64)
"""Used if the cluster description has no `scale`."""
MIX_MAX: Final = 5_000
"""Requests in a mix for measuring replicas."""
GROWN: Final = (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0)
"""Factors by which a planned fleet is enlarged when tried."""
NEAR: Final = 0.002
"""A larger fleet is only better if it answers at least this share more requests in time."""
TRIED_MAX: Final = 50_000
"""Larger workloads are not tried: the plan is used as it is, as trying takes as long as everything else."""
SLOW: Final = 1.2
"""90th percentile of start times, relative to the median."""


class SizingSpec(NamedTuple):
    """A name and its optional number: `hpa@16` keeps 16, `static@6` are six replicas."""

    name: str
    number: float | None = None


def parse_sizing(text: str) -> SizingSpec:
    """Parse a sizing. Raises ValueError, which says what is allowed."""
    name, at, number = text.partition("@")
    if name not in NAMES or (at and name not in (STATIC, *HELD)):
        shown = [
            f"{each}[@{'N' if each == STATIC else 'TARGET'}]" if each in (STATIC, *HELD) else each for each in NAMES
        ]
        raise ValueError(", ".join(shown))
    if not at:
        return SizingSpec(name)
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    most = REPLICAS_MAX if name == STATIC else 1e12
    if not 0 < value <= most or (name == STATIC and value != int(value)):
        raise ValueError(
            f"{name}@N with 1 to {REPLICAS_MAX}" if name == STATIC else f"{name}@TARGET with more than 0"
        )
    return SizingSpec(name, value)


def scale_of(cluster: SimCluster, spec: SizingSpec) -> Scale:
    """The scaling of a cluster by one of the product's policies."""
    settings = cluster.scale or USUAL
    if spec.name != settings.policy or spec.number is not None:
        target = settings.target if spec.number is None else spec.number
        settings = settings.model_copy(update={"policy": Policy(spec.name), "target": target})
    return settings.value(cluster.slo.ttft_s, cluster.slo.tpot_s)


def cold_start_s(cluster: SimCluster) -> float:
    """Start time of a replica on such a cluster, seconds."""
    if cluster.start_s is not None:
        return cluster.start_s
    return start_s(hardware(cluster.gpu, cluster.model, cluster.tensor_parallel, cluster.precision), Start.LOCAL)


def sizing(text: str, cluster: SimCluster, workload: Workload) -> Sizing:
    """The sizing for a replay. Plans take a minute, plus a fluid replay of the load."""
    spec, took_s = parse_sizing(text), cold_start_s(cluster)
    match spec.name:
        case "static":
            return Sizing(cluster.replicas if spec.number is None else int(spec.number))
        case "peak":
            load, replicas = planned(cluster, workload)
            fewest = peak(load, replicas, cluster.replicas)
            return _tried(lambda times: Sizing(ceil(fewest * times)), cluster, workload)
        case "oracle":
            load, replicas = planned(cluster, workload)
            plan = ahead(needed(load, replicas), took_s * SLOW, load.tick_s)
            each = range(int(load.tick_s / LOOK_S))

            def grown(times: float) -> Sizing:
                looks = [ceil(count * times) for count in plan for _ in each]
                return Sizing(looks[0], Planned(looks), took_s)

            return _tried(grown, cluster, workload)
        case _:
            scale = scale_of(cluster, spec)
            begin = min(max(cluster.replicas, scale.min), scale.max)
            least = min([scale.min, *(hours.min for hours in scale.schedule if hours.min is not None)])
            return Sizing(begin, Scaler(scale), took_s, on_demand=least == 0)


def _tried(grown: Callable[[float], Sizing], cluster: SimCluster, workload: Workload) -> Sizing:
    """The smallest enlargement that meets the objective, or is as good as any."""
    if len(workload.arrivals) > TRIED_MAX:
        return grown(1.0)
    slo, found = Slo(cluster.slo.ttft_s, cluster.slo.tpot_s), list[float]()
    for times in GROWN:
        outcome = replay(workload, cluster, policy=POLICY, sizing=grown(times))
        found.append(summary(outcome, slo).goodput)
        if found[-1] >= ATTAINMENT:
            break
    enough = min(ATTAINMENT, max(found) - NEAR)
    return grown(next(times for times, good in zip(GROWN, found, strict=False) if good >= enough))


def planned(cluster: SimCluster, workload: Workload) -> tuple[Load, Response]:
    """A load by ticks, and the replicas' response to it."""
    cold = computed(workload)
    mix = _mix(cold)
    return loads.ticks(Workload(workload.name, cold)), response(cluster, mix, measured(cluster, mix))


def computed(workload: Workload) -> Columns:
    """The requests with only the uncached part of their prompts, given a single unbounded cache."""
    requests = columns(workload.arrivals)
    if not requests.blocks:
        return requests
    seen: set[int] = set()
    prompts = array("i")
    for blocks, prompt_tokens in zip(requests.blocks, requests.prompt_tokens, strict=True):
        held = next((at for at, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks[held:])
        prompts.append(max(1, prompt_tokens - held * workload.block_tokens))
    return Columns(requests.at_s, prompts, requests.output_tokens)


def _mix(requests: Columns) -> Mix:
    count = len(requests)
    chosen: Sequence[int] = range(count)
    if count > MIX_MAX:
        chance = Random(count)  # noqa: S311 - the same trace is to give the same mix
        chosen = sorted(chance.sample(chosen, MIX_MAX))
    return tuple([(requests.prompt_tokens[at], requests.output_tokens[at]) for at in chosen])
