"""Charts of a run. The only file that imports matplotlib (extra `plot`)."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from forebay.cli.bench.stats import Report, Samples

BUCKETS_MAX = 60
POINTS_MAX = 20_000
"""More points are thinned out: they would not be visible."""
COLOURS = {"time to first token": "#1f77b4", "end to end": "#d62728", "time per output token": "#2ca02c"}


def save(path: Path, report: Report, samples: Samples) -> None:
    """Write the charts (the suffix decides the format): latency distributions, and latency and rate over time."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    figure.suptitle(f"{report.model} at {report.url}: {report.load}", fontsize=12)
    above, below = figure.subplots(2, 2)
    columns = {"end to end": samples.latency_s}
    if report.ttft_ms:
        columns = {"time to first token": samples.ttft_s, **columns}
    _cdf(above[0], columns, "Latency of requests")
    if report.tpot_ms:
        _cdf(above[1], {"time per output token": samples.tpot_s}, "Time per output token")
    else:
        _histogram(above[1], samples)
    _over_time(below[0], samples.start_s, columns)
    _rate(below[1], report, samples)
    figure.savefig(path, dpi=110)


def _cdf(axes: Axes, columns: Mapping[str, Sequence[float]], title: str) -> None:
    for name, column in columns.items():
        ordered = np.sort(np.asarray([v for v in column if not math.isnan(v)])) * 1000
        if not len(ordered):
            continue
        at = np.linspace(0, len(ordered) - 1, min(len(ordered), POINTS_MAX)).astype(int)
        axes.plot(ordered[at], (at + 1) / len(ordered), label=name, color=COLOURS[name], drawstyle="steps-post")
    for q in (0.5, 0.95, 0.99):
        axes.axhline(q, color="0.85", linewidth=0.8, zorder=0)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 0.95, 1])
    axes.set(title=title, xlabel="milliseconds", ylabel="share of requests", ylim=(0, 1.01))
    axes.set_xlim(left=0)
    axes.legend(loc="lower right", frameon=False)


def _histogram(axes: Axes, samples: Samples) -> None:
    axes.hist(np.asarray(samples.latency_s) * 1000, bins=40, color=COLOURS["end to end"], alpha=0.8)
    axes.set(title="End to end", xlabel="milliseconds", ylabel="requests")


def _over_time(axes: Axes, start_s: Sequence[float], columns: Mapping[str, Sequence[float]]) -> None:
    step = max(1, len(start_s) // POINTS_MAX)
    for name, column in columns.items():
        values = np.asarray(column[::step]) * 1000
        axes.plot(np.asarray(start_s[::step]), values, ".", markersize=3, alpha=0.5, color=COLOURS[name], label=name)
    axes.set(title="Latency over time", xlabel="seconds from the start", ylabel="milliseconds")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", frameon=True, framealpha=0.8, markerscale=3)


def _rate(axes: Axes, report: Report, samples: Samples) -> None:
    ends = np.asarray(samples.start_s) + np.asarray(samples.latency_s)
    span_s = max(report.duration_s, 1e-9)
    buckets = max(1, min(BUCKETS_MAX, samples.answered // 10))
    counts, edges = np.histogram(ends, bins=buckets, range=(0, span_s))
    axes.stairs(counts / (span_s / buckets), edges, fill=True, color="#7f7fbf", alpha=0.7)
    axes.axhline(report.requests_per_s, color="0.3", linewidth=1, linestyle="--")
    axes.set(title="Answers per second (dashed: whole run)", xlabel="seconds from the start", ylabel="requests/s")
    axes.set_xlim(0, span_s)
    axes.set_ylim(bottom=0)
