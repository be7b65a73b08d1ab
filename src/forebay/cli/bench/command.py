"""Runs a plan in the terminal: progress on standard error, the report on standard output."""

import asyncio
import signal
import ssl
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import msgspec
import uvloop
from rich.console import Console
from rich.live import Live

from forebay.cli.bench.plan import BadPlan, Kind, Plan, Recipe, recipe
from forebay.cli.bench.run import Load
from forebay.cli.bench.stats import About, Report, Samples, Slo, report
from forebay.cli.bench.view import live, report_view
from forebay.cli.server import choose_model, connect, trusted
from forebay.cli.settings import INTERRUPTED, WRONG_USAGE, UserError, screen

REFRESH_S = 0.25
NOTHING_ANSWERED = 1


@dataclass(frozen=True, slots=True)
class Output:
    """Where the result goes."""

    as_json: bool
    plot: Path | None


def about(plan: Recipe, slo: Slo) -> About:
    """The part of the report that is known before the run."""
    settings = {
        "concurrency": plan.concurrency if plan.rate is None else None,
        "rate": plan.rate,
        "requests": plan.requests,
        "duration_s": plan.duration_s,
        "warmup": plan.warmup,
        "prompt_tokens": str(plan.prompt),
        "output_tokens": str(plan.output),
        "stream": plan.stream,
        "fixed_output": plan.fixed_output,
        "temperature": plan.temperature,
        "batch": plan.batch,
        "seed": plan.seed,
        "headers": ", ".join(name for name, _ in plan.headers),  # values may be secret
    }
    if plan.rate is None:
        load = f"closed loop, {plan.concurrency} at once"
    else:
        load = f"open loop, {plan.rate:g} requests/s, Poisson arrivals"
    return About(
        plan.target.url, plan.model, plan.kind.value, load, settings, plan.stream, plan.rate is not None, slo
    )


async def _measure(plan: Recipe, tls: ssl.SSLContext | None, progress_to: Console) -> tuple[Load, Samples]:
    load = Load(plan, tls)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, load.stop)

    async def show(shown: Live) -> None:
        while True:
            shown.update(live(plan, load.progress, perf_counter()), refresh=True)
            await asyncio.sleep(REFRESH_S)

    with Live(console=progress_to, auto_refresh=False, transient=True) as shown:
        async with asyncio.TaskGroup() as group:
            # drawing without a terminal would only take CPU from a server on this machine
            watcher = group.create_task(show(shown)) if progress_to.is_terminal else None
            try:
                samples = await load.run()
            finally:
                if watcher is not None:
                    watcher.cancel()
                loop.remove_signal_handler(signal.SIGINT)
    return load, samples


def bench(plan: Plan, slo: Slo, output: Output) -> int:
    """Run the plan, print the report, return the exit code. Raises `UserError`."""
    results, notes_to = screen(), screen(stderr=True)
    try:
        checked = recipe(plan)
        check_plot(output.plot)
    except BadPlan as error:
        raise UserError(str(error), WRONG_USAGE) from error
    tls = trusted(checked.target.url, plan.ca)
    with connect(checked.target.url, plan.api_key, tls) as client:
        model = choose_model(client, plan.model, "embed" if checked.kind is Kind.EMBED else "chat")
    checked = replace(checked, model=model)
    load, samples = uvloop.run(_measure(checked, tls, notes_to))
    progress = load.progress
    result = report(about(checked, slo), samples, progress.elapsed_s(progress.ended_s), progress.interrupted)
    if output.as_json:
        results.out(msgspec.json.format(msgspec.json.encode(result)).decode(), highlight=False)
    else:
        results.print(report_view(result))
    if output.plot and samples.answered:
        draw(output.plot, result, samples, notes_to)
    if progress.interrupted:
        return INTERRUPTED
    return 0 if samples.answered else NOTHING_ANSWERED


def draw(path: Path, result: Report, samples: Samples, notes_to: Console) -> None:
    """Write the chart, or print why that failed."""
    from forebay.cli.bench.plot import save

    try:
        save(path, result, samples)
    except (OSError, ValueError) as error:
        notes_to.print(f"[red]The picture was not written:[/] {error}", highlight=False)
    else:
        notes_to.print(f"[dim]picture: {path}[/]", highlight=False)


def check_plot(path: Path | None) -> None:
    """Raise `BadPlan` before the run if the chart cannot be drawn."""
    if path is None:
        return
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise BadPlan(f"--plot: found {str(path)!r}; allowed: a file that ends in .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise BadPlan(f"--plot: the folder {str(path.absolute().parent)!r} does not exist")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BadPlan("--plot: needs matplotlib; install it with: pip install 'forebay[plot]'") from error
