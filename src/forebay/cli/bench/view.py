"""Formats a run: the progress line and the report."""

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from forebay.cli.bench.plan import Recipe
from forebay.cli.bench.run import Progress
from forebay.cli.bench.stats import Report, Spread, quantile

RECENT = 200
"""The progress line shows the median of this many recent responses."""


def live(plan: Recipe, progress: Progress, now: float) -> RenderableType:
    """The progress of a run, and its current figures."""
    if progress.warming:
        return Text(f"warming up: {plan.warmup} requests, not counted", style="dim")
    samples, elapsed_s = progress.samples, progress.elapsed_s(now)
    done = samples.answered + samples.failed
    share = min(1.0, max(done / plan.requests, elapsed_s / plan.duration_s))
    per_s = 1 / elapsed_s if elapsed_s > 0 else 0.0
    facts = [
        f"{done:,} done",
        f"{progress.in_flight:,} in flight",
        f"{samples.answered * per_s:,.1f} req/s",
        f"{samples.output_tokens * per_s:,.0f} tok/s",
    ]
    if plan.stream:
        facts.append(f"TTFT {_recent_ms(samples.ttft_s)}")
    facts.append(f"e2e {_recent_ms(samples.latency_s)}")
    line = Text("  ".join(facts))
    if samples.failed:
        line.append(f"  {samples.failed:,} failed", style="bold red")
    bar = Table.grid(padding=(0, 2))
    bar.add_row(ProgressBar(total=1.0, completed=share, width=30), f"{share:4.0%}", f"{elapsed_s:,.0f} s")
    return Group(bar, line)


def _recent_ms(column: Sequence[float]) -> str:
    recent = sorted(v for v in column[-RECENT:] if not math.isnan(v))
    return ms(quantile(recent, 0.5) * 1000) if recent else "-"


def ms(value: float) -> str:
    """Milliseconds with three figures: `4.21 ms`, `318 ms`, `12.4 s`."""
    if value >= 10_000:
        return f"{value / 1000:,.1f} s"
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def report_view(report: Report) -> RenderableType:
    """Format the report."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    for name, value in _facts(report):
        facts.add_row(name, value)
    parts: list[RenderableType] = [facts, Text()]
    if report.interrupted:
        parts.insert(0, Text("Interrupted: this is what was measured until then.", style="yellow"))
    if report.e2e_ms:
        parts.append(_latencies(report))
    if report.errors:
        parts.append(_errors(report))
    return Group(*parts)


def _facts(report: Report) -> list[tuple[str, RenderableType]]:
    source = {
        "usage": "counted by the server",
        "chunks": "counted as pieces of the stream: the server sends no usage",
        "mixed": "counted by the server where it sends usage, else as pieces of the stream",
    }[report.tokens_from]
    rows: list[tuple[str, RenderableType]] = [
        ("server", f"{escape(report.url)}  model {escape(report.model)}  {report.task}"),
        ("load", report.load),
        ("answered", f"{report.answered:,} of {report.requests:,} requests in {report.duration_s:,.1f} s"),
        ("requests/s", f"{report.requests_per_s:,.2f}"),
    ]
    if report.task != "embed" and report.answered:
        rows.append(("output tokens/s", f"{report.output_tokens_per_s:,.1f}  [dim]({source})[/]"))
    if report.prompt_tokens:
        rows.append(("prompt tokens/s", f"{report.prompt_tokens_per_s:,.1f}"))
    if report.sent_late_ms:
        late = report.sent_late_ms
        why = "[dim](in the latencies: they count from when a request was due)[/]"
        rows.append(("sent late", f"p99 {ms(late.p99)}, at most {ms(late.max)}  {why}"))
    if report.goodput:
        goodput, slo = report.goodput, report.goodput.slo
        names = (("TTFT", slo.ttft_ms), ("TPOT", slo.tpot_ms), ("end to end", slo.e2e_ms))
        limits = ", ".join(f"{name} ≤ {ms(v)}" for name, v in names if v is not None)
        rows.append(
            ("goodput", f"{goodput.requests_per_s:,.2f} requests/s, {goodput.share:.1%} of all  [dim]({limits})[/]")
        )
    return rows


def _latencies(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="bold")
    table.add_column("")
    for name in ("mean", "p50", "p95", "p99", "max"):
        table.add_column(name, justify="right")
    rows: tuple[tuple[str, Spread | None], ...] = (
        ("time to first token", report.ttft_ms),
        ("time per output token", report.tpot_ms),
        ("end to end", report.e2e_ms),
    )
    for name, spread in rows:
        if spread:
            table.add_row(name, *(ms(v) for v in (spread.mean, spread.p50, spread.p95, spread.p99, spread.max)))
    return table


def _errors(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="bold red", title_justify="left")
    table.add_column("failed")
    table.add_column("requests", justify="right")
    for code, number in sorted(report.errors.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(escape(code), f"{number:,}")
    return table
