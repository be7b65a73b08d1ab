"""The report as one self-contained HTML page: no scripts, external files or network access."""

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import NamedTuple

import jinja2

from forebay.sim.replay.cluster import SimCluster
from forebay.sim.report.chart import Chart, Series, svg
from forebay.sim.report.curves import Curves
from forebay.sim.report.facts import Scope, facts
from forebay.sim.report.figures import Row
from forebay.sim.report.tables import refusals, tables, title


class Report(NamedTuple):
    """The content of a report."""

    scope: Scope
    cluster: SimCluster
    rows: Sequence[Row]
    curves: Mapping[str, Curves]
    """Policy → its curves at `curves_at`."""
    curves_at: str
    """The run that the curves are of; empty: there is only one per policy."""
    command: str
    """A shell command that reproduces the figures."""


def page(report: Report) -> str:
    """The page."""
    template = (resources.files("forebay.sim.report") / "page.html").read_text()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(template).render(
        report=report,
        facts=facts(report.scope, report.cluster),
        tables=[
            (title(scale, report.scope), *tables(report.rows, report.scope, scale), refusals(report.rows, scale))
            for scale in report.scope.scales
        ],
        charts=[svg(chart) for chart in charts(report)],
    )


def charts(report: Report) -> list[Chart]:
    """TTFT and TPOT distributions, goodput over time, and each replica's work, or their number if it changes."""
    curves = report.curves
    arrived = next(iter(curves.values())).arrived
    return [
        Chart(
            "Time to first token",
            "seconds (each mark: ten times)",
            "share of all requests",
            [Series(policy, each.ttft, steps=True) for policy, each in curves.items()],
            log_x=True,
            y_max=1.0,
        ),
        Chart(
            "Time for each token after the first",
            "seconds, the mean of a request (each mark: ten times)",
            "share of all requests",
            [Series(policy, each.tpot, steps=True) for policy, each in curves.items()],
            log_x=True,
            y_max=1.0,
        ),
        Chart(
            "Answered within the limits",
            "seconds from the start, by when requests came",
            "requests per second",
            [
                *(Series(policy, each.good, steps=True) for policy, each in curves.items()),
                Series("all that came", arrived, steps=True, faint=True),
            ],
        ),
        _sizes(curves) if report.scope.fleets else _work(curves),
    ]


def _work(curves: Mapping[str, Curves]) -> Chart:
    return Chart(
        "Work of the replicas",
        "replicas, the one with the most work first",
        "prompt tokens that each had to compute, millions",
        [Series(policy, _by_rank(each.computed), steps=True) for policy, each in curves.items()],
    )


def _sizes(curves: Mapping[str, Curves]) -> Chart:
    return Chart(
        "Replicas",
        "seconds from the start",
        "replicas, also those that start or finish",
        [Series(policy, each.replicas, steps=True) for policy, each in curves.items()],
    )


def _by_rank(tokens: Sequence[int]) -> list[tuple[float, float]]:
    """One step per replica, including the last one."""
    return [(float(rank), each / 1e6) for rank, each in enumerate((*tokens, tokens[-1]))]
