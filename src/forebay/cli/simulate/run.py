"""Runs a plan: progress on standard error, figures on standard output, and a report in a file."""

from collections.abc import Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Final

import msgspec
from rich.console import Console

from forebay.cli.settings import WRONG_USAGE, UserError, screen
from forebay.cli.simulate.plan import Plan, SimulationOptions, command, plan
from forebay.cli.simulate.processes import replays
from forebay.cli.simulate.view import bars, document, view
from forebay.sim.load.describe import describe
from forebay.sim.report.curves import Curves
from forebay.sim.report.facts import Scope
from forebay.sim.report.figures import Result, rows
from forebay.sim.report.page import Report, page

FORMATS: Final = (".html", ".png")
NEXT: Final = (
    "",
    "Try next:",
    "  forebay simulate --trace mooncake --report report.html       the whole hour, and charts",
    "  forebay simulate --speed 1.4                                 more load",
    "  forebay simulate --policy cpr --policy smg_cache_aware       beside another system's policy",
    "  forebay simulate --replicas 6 --seeds 5                      fewer replicas; how far figures are certain",
    "  forebay simulate --fleet forebay --fleet static              what scaling would save, and cost",
    "  forebay simulate --trace FILE                                your own: see --help, docs/simulate.md",
    "  forebay simulate --calibration                               how far to believe it",
)


def run(options: SimulationOptions, report_to: Path | None, as_json: bool) -> int:
    """Run the simulation and print the results; returns the exit code. Raises `UserError`."""
    _check(report_to)
    checked = plan(options)
    notes_to, began = screen(stderr=True), perf_counter()
    report = _report(checked, notes_to)
    took_s = perf_counter() - began
    output = screen()
    if as_json:
        text = msgspec.json.format(msgspec.json.encode(document(report.rows, report.scope))).decode()
        output.out(text, highlight=False)
    else:
        output.print(
            view(
                report,
                output.width,
                [_took(checked, report, took_s), *(NEXT if options == SimulationOptions() else ())],
            )
        )
    if report_to is not None:
        _write(report_to, report, notes_to)
    return 0


def _report(plan: Plan, notes_to: Console) -> Report:
    workload = lru_cache(maxsize=1)(plan.workload)
    with notes_to.status("reading the trace"):
        load = workload(plan.seeds[0])
        scope = Scope(load.name, describe(load), plan.names, plan.seeds, plan.scales, plan.fleets)
    shown_scale = 1.0 if 1.0 in plan.scales else plan.scales[0]
    results: list[Result] = []
    curves: dict[str, Curves] = {}
    with bars(plan, notes_to) as shown, closing(replays(plan, workload)) as runs:
        for update in runs:
            shown.update(update)
            if update.result is not None and update.curves is not None:
                results.append(update.result)
                if update.run.seed == plan.seeds[0] and update.run.scale == shown_scale:
                    curves[update.run.name] = update.curves
    return Report(
        scope,
        plan.cluster,
        rows(_in_order(results, plan), plan.cluster),
        {name: curves[name] for name in plan.names},
        _shown_at(plan, shown_scale),
        command(plan.options),
    )


def _in_order(results: Sequence[Result], plan: Plan) -> list[Result]:
    """In the order of the plan, whichever was done first."""
    by_run = {(each.seed, each.scale, each.policy, each.fleet): each for each in results}
    return [by_run[run] for run in plan.runs]


def _shown_at(plan: Plan, scale: float) -> str:
    parts = [f"seed {plan.seeds[0]}"] if len(plan.seeds) > 1 else []
    if len(plan.scales) > 1:
        parts.append(f"step times x {scale:g}")
    return ", ".join(parts)


def _took(plan: Plan, report: Report, took_s: float) -> str:
    return f"{report.scope.load.requests * len(plan.runs):,} requests simulated in {took_s:.1f} s"


def _check(report_to: Path | None) -> None:
    """Raise `UserError` before the simulation if the report cannot be written."""
    if report_to is None:
        return
    if report_to.suffix.lower() not in FORMATS:
        raise UserError(
            f"--report: found {str(report_to)!r}; allowed: a file that ends in {' or '.join(FORMATS)}", WRONG_USAGE
        )
    if not report_to.absolute().parent.is_dir():
        raise UserError(f"--report: the folder {str(report_to.absolute().parent)!r} does not exist", WRONG_USAGE)
    if report_to.suffix.lower() == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            text = (
                "--report: a .png needs matplotlib; install it with: pip install 'forebay[plot]'; .html needs nothing"
            )
            raise UserError(text, WRONG_USAGE) from error


def _write(path: Path, report: Report, notes_to: Console) -> None:
    try:
        if path.suffix.lower() == ".png":
            from forebay.cli.simulate.picture import save

            save(path, report)
        else:
            path.write_text(page(report))
    except OSError as error:
        raise UserError(f"--report: {path} was not written ({error.strerror}).") from error
    notes_to.print(f"[dim]report: {path}[/]", highlight=False)
