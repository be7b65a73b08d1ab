"""The charts of a report as an image. Needs matplotlib (extra `plot`)."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from forebay.sim.report.chart import Chart, decades
from forebay.sim.report.facts import facts
from forebay.sim.report.figures import FIGURES, shown
from forebay.sim.report.page import Report, charts
from forebay.sim.report.tables import title

SHOWN = ("goodput", "ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "tpot_p99_s", "cache_hit", "imbalance")
"""Figures above the charts."""
OF_FLEETS = (
    "goodput",
    "ttft_p50_s",
    "ttft_p99_s",
    "tpot_p99_s",
    "replicas_mean",
    "replicas_max",
    "turns",
    "gpu_hours",
)
"""The same for comparisons of fleets."""


def save(path: Path, report: Report) -> None:
    """Write an image (the suffix decides the format): what was simulated, some figures, and the charts."""
    figure = Figure(figsize=(13, 11), layout="constrained")
    figure.suptitle(words(report), x=0.01, ha="left", fontsize=9, family="monospace")
    for axes, chart in zip(figure.subplots(2, 2).flat, charts(report), strict=True):
        _draw(axes, chart)
    figure.savefig(path, dpi=110)


def words(report: Report) -> str:
    """What was simulated and some figures, for a monospaced font."""
    named = facts(report.scope, report.cluster)
    names, head = (OF_FLEETS, "fleet") if report.scope.fleets else (SHOWN, "policy")
    lines = [[title(report.scope.scales[0], report.scope) or head, *(FIGURES[name].label for name in names)]]
    for row in report.rows:
        if row.scale == report.scope.scales[0]:
            lines.append([row.name, *(shown(row.figures[name].mean, FIGURES[name].unit) for name in names)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
    return "\n".join([*(f"{name:<10} {text}" for name, text in named), "", *table, ""])


def _draw(axes: Axes, chart: Chart) -> None:
    for number, series in enumerate(chart.series):
        across, up = zip(*series.points, strict=True) if series.points else ((), ())
        axes.plot(
            across,
            up,
            label=series.name,
            color="0.5" if series.faint else f"C{number}",
            linestyle=":" if series.faint else "-",
            drawstyle="steps-post" if series.steps else "default",
        )
    axes.set(title=chart.title, xlabel=chart.x, ylabel=chart.y)
    if chart.log_x:
        axes.set_xscale("log")
        axes.set_xlim(*decades(chart))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0, chart.y_max and chart.y_max * 1.01)
    axes.grid(visible=True, color="0.9")
    axes.legend(frameon=False, fontsize=8)
