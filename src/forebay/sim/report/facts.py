"""A description of the simulation, the same on screen and page."""

from collections.abc import Sequence
from typing import NamedTuple

from forebay.sim.fleet.policies import USUAL, cold_start_s
from forebay.sim.load.describe import Description, Spread
from forebay.sim.replay.cluster import SimCluster

SPEEDS_SHOWN = 6


class Scope(NamedTuple):
    """What was replayed and how often."""

    workload: str
    load: Description
    policies: Sequence[str]
    """The row labels of tables."""
    seeds: Sequence[int]
    scales: Sequence[float]
    fleets: Sequence[str] = ()
    """Sizers of fleets; empty: constant size."""


def facts(scope: Scope, cluster: SimCluster) -> list[tuple[str, str]]:
    """Labels and texts."""
    load, slo = scope.load, cluster.slo
    told = [
        ("cluster", _cluster(cluster)),
        ("gateways", _gateways(cluster)),
        ("trace", scope.workload),
        ("requests", f"{load.requests:,} in {span(load.span_s)}, {load.rate_per_s:.3g}/s, {_arrivals(load.gap_cv)}"),
        ("tokens", f"prompts {_spread(load.prompt_tokens)}; answers {_spread(load.output_tokens)}"),
        ("prefixes", _prefixes(load)),
        ("good", f"first token within {slo.ttft_s:g} s, then {slo.tpot_s * 1000:g} ms per token on average"),
    ]
    if scope.fleets:
        told.insert(1, ("fleet", _fleet(cluster)))
    if len(scope.seeds) > 1:
        told.append(("seeds", f"{scope.seeds[0]} to {scope.seeds[-1]}; ± is the 95 % interval of the mean over them"))
    if tuple(scope.scales) != (1.0,):
        told.append(("step times", f"{', '.join(f'{scale:g}' for scale in scope.scales)} times the model's"))
    return told


def _cluster(cluster: SimCluster) -> str:
    text = (
        f"{cluster.replicas} replica{'s' * (cluster.replicas > 1)} of {cluster.model} {cluster.precision}, each on "
        f"{cluster.tensor_parallel} x {cluster.gpu}"
    )
    if set(cluster.speeds) != {1.0}:
        shown = ", ".join(f"{speed:g}" for speed in cluster.speeds[:SPEEDS_SHOWN])
        text += f", speeds {shown}{', …' if len(cluster.speeds) > SPEEDS_SHOWN else ''}"
    return text if cluster.kv_tokens is None else f"{text}, {cluster.kv_tokens:,} KV tokens"


def _fleet(cluster: SimCluster) -> str:
    scale = cluster.scale or USUAL
    return (
        f"begins with that many; {scale.min} to {scale.max} where it is scaled; a start takes "
        f"{span(cold_start_s(cluster))}; GPU-hours count from a replica's order until it has stopped"
    )


def _gateways(cluster: SimCluster) -> str:
    blocks = "" if cluster.reports_blocks else ", without reports of prefix caches"
    return f"{cluster.gateways}, load reports of replicas every {cluster.report_every_s:g} s{blocks}"


def _arrivals(gap_cv: float) -> str:
    return f"gaps vary by {gap_cv:.2f} of their mean (1: Poisson)"


def _spread(tokens: Spread) -> str:
    return f"p50 {tokens.p50:,.0f}, p95 {tokens.p95:,.0f}, mean {tokens.mean:,.0f}"


def _prefixes(load: Description) -> str:
    if load.hit_share is None:
        return "shared prefixes are unknown: no cache can hit"
    return f"an unbounded cache would hit {load.hit_share:.1%} of all prompt tokens"


def span(seconds: float) -> str:
    """A readable duration: `42 s`, `59 min`, `7.0 days`."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} hours" if seconds < 2 * 86_400 else f"{seconds / 86_400:.1f} days"
