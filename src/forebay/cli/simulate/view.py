"""Formats simulations: progress bars, then facts and tables; and the same as JSON."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table as Grid
from rich.text import Text

from forebay.cli.simulate.plan import Plan, Run
from forebay.cli.simulate.processes import ReplayProgress
from forebay.sim.fleet.policies import ORACLE, PEAK
from forebay.sim.report.facts import Scope, facts
from forebay.sim.report.figures import Estimate, Row
from forebay.sim.report.page import Report
from forebay.sim.report.tables import Table, refusals, tables, title

BARS_MAX: Final = 8
"""With more runs than this, finished ones are not shown any more."""
LOOKS: Final = {"better": "green", "worse": "red", "": ""}


class _Rate(ProgressColumn):
    """Requests per second of real time."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_speed or task.speed or 0:,.0f} requests/s", style="dim")


class Bars:
    """A progress bar for each run in progress."""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self._plan = plan
        self._progress = progress
        self._many = len(plan.runs) > BARS_MAX
        self._all = progress.add_task("runs", total=len(plan.runs)) if self._many else None
        self._bars: dict[Run, Any] = {}

    def update(self, update: ReplayProgress) -> None:
        """Update the bar of a run."""
        progress, run = self._progress, update.run
        bar = self._bars.get(run)
        if bar is None:
            bar = self._bars[run] = progress.add_task(self._name(run), total=update.requests)
        plans = run.fleet in (PEAK, ORACLE) and not update.done
        progress.update(bar, completed=update.done, description=f"{self._name(run)}{': planning' if plans else ''}")
        if update.result is not None and self._all is not None:
            progress.remove_task(bar)
            progress.advance(self._all)

    def _name(self, run: Run) -> str:
        parts = [run.name]
        if len(self._plan.scales) > 1:
            parts.append(f"x{run.scale:g}")
        if len(self._plan.seeds) > 1:
            parts.append(f"seed {run.seed}")
        return " ".join(parts)


@contextmanager
def bars(plan: Plan, console: Console) -> Iterator[Bars]:
    """Show progress bars, and remove them at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Bars(plan, progress)


def view(report: Report, width: int, notes: Sequence[str]) -> RenderableType:
    """Facts and tables for a screen with this number of columns, and notes."""
    scope = report.scope
    shown = Grid.grid(padding=(0, 2))
    shown.add_column(style="dim")
    shown.add_column()
    for name, text in facts(scope, report.cluster):
        shown.add_row(name, Text(text))
    parts: list[RenderableType] = [shown]
    for scale in scope.scales:
        main, compared = tables(report.rows, scope, scale)
        over = title(scale, scope)
        parts += [Text(f"\n{over}" if over else "", style="bold"), grid(main, width)]
        parts += [Text(f"refused by {refused}", style="dim") for refused in refusals(report.rows, scale)]
        if compared is not None:
            against = f"\nLess {scope.policies[0]}, paired by seed; coloured where the interval leaves 0 out"
            parts += [Text(against, style="bold"), grid(compared, width)]
    if notes:
        parts.append(Text("\n" + "\n".join(notes), style="dim"))
    return Group(*parts)


def grid(table: Table, width: int) -> Grid:
    """One row per policy; if that is too wide, one column per policy."""
    lines = [[Text(table.head), *map(Text, table.columns)]]
    for name, cells in table.lines:
        figures = (Text(f"{cell.text} {cell.margin}".rstrip(), style=LOOKS[cell.look]) for cell in cells)
        lines.append([Text(name), *figures])
    if _width(lines) > width:
        turned = [list(line) for line in zip(*lines, strict=True)]
        lines = min(lines, turned, key=lambda each: max(width, _width(each)))
    drawn = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for at, head in enumerate(lines[0]):
        drawn.add_column(head, justify="right" if at else "left", no_wrap=not at)
    for line in lines[1:]:
        drawn.add_row(*line)
    return drawn


def _width(lines: Sequence[Sequence[Text]]) -> int:
    """Width in columns without wrapping."""
    return sum(max(len(text) for text in column) + 2 for column in zip(*lines, strict=True)) - 2


def document(rows: Sequence[Row], scope: Scope) -> list[dict[str, object]]:
    """The rows as JSON: the mean of every figure by its name, and the half-width of its confidence interval."""
    return [
        {
            "policy": row.policy,
            **({"fleet": row.fleet} if row.fleet else {}),
            "trace": scope.workload,
            "scale": row.scale,
            "seeds": list(scope.seeds),
            "requests": row.requests,
            **{name: found.mean for name, found in row.figures.items()},
            "refused_by_reason": dict(row.refused),
            "half_width": {name: found.half_width for name, found in row.figures.items()},
            "compared_to": scope.policies[0] if row.against else None,
            "difference": {name: _estimate(found) for name, found in row.against.items()},
        }
        for row in rows
    ]


def _estimate(found: Estimate) -> dict[str, float | None]:
    return {"mean": found.mean, "half_width": found.half_width}
