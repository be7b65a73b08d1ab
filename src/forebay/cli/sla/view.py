"""Formats `/v1/sla`: the objective, the computed availability, what was delivered, and what is unknown."""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

import msgspec
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from forebay.cli.deploy.client import Admin
from forebay.cli.view.table import table
from forebay.control.standby.sla import ModelSla, PromiseDocument, Sla
from forebay.core.availability.budget import Budget, Requests
from forebay.core.availability.history import Gap, Incident
from forebay.core.availability.measured import PRIOR_FAILURES, PRIOR_MTBF_S, PRIOR_MTTR_S

PATH = "/v1/sla"
SHOWN_MAX = 10
"""Only the newest incidents and gaps are shown: `--json` has more."""
BAR_COLUMNS = 30
DIGITS_MAX = 6
"""Maximum decimals of a percentage."""
NAMES = {"ttft": "time to first token", "tpot": "time per token", "latency": "latency"}


def show(admin: Admin, model: str | None, period_s: int, as_json: bool, screen: Console) -> int:
    """Print the report. Raises `UserError` if the API is unreachable, or there is no such model."""
    query: dict[str, str | int] = {"period_s": period_s, **({"model": model} if model is not None else {})}
    if as_json:
        print(msgspec.json.format(admin.raw("GET", PATH, query=query), indent=2).decode())
    else:
        screen.print(view(admin.get(PATH, Sla, **query)))
    return 0


def view(it: Sla) -> RenderableType:
    """Format the document."""
    head = Text(f"{_time(it.since)} to {_time(it.until)} UTC, {span(it.until - it.since)}", "dim")
    parts: list[RenderableType] = [head]
    for model in it.models:
        parts += [Text(), *_model(model)]
    if it.incidents:
        parts += [Text(), Text("the cluster", "bold"), _incidents(it.incidents)]
    if it.incidents_more:
        parts.append(Text(f"  {it.incidents_more:,} further incidents were counted but not kept", "dim"))
    return Group(*parts)


def _model(it: ModelSla) -> Iterator[RenderableType]:
    target = f"objective {share(it.target)}" if it.target is not None else "no objective is set (slo.availability)"
    yield Text.assemble((it.name, "bold"), f"  {target}")
    figures = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 2))
    figures.add_column(no_wrap=True)
    figures.add_column()
    for name, value in _figures(it):
        figures.add_row(name, value)
    yield figures
    if it.gaps:
        yield _below(Text(f"no data for {_gaps(it.gaps)}", "yellow"))
    if it.incidents:
        yield _incidents(it.incidents)


def _figures(it: ModelSla) -> Iterator[tuple[str, RenderableType]]:
    yield "delivered", _available(it)
    yield "requests", _requests(it.requests)
    if it.budget is not None:
        yield from _budget(it.budget, it.requests)
    for each in it.kept:
        good = "green" if each.p99_s <= each.promised_s else "bold red"
        told = Text.assemble(
            (f"p99 {seconds(each.p99_s)}", good), f", objective {seconds(each.promised_s)}; ",
            f"{share(each.kept / each.requests)} of {each.requests:,} within it, since {_time(each.since)}",
        )  # fmt: skip
        yield NAMES[each.promise], told
    promise = it.promise
    yield (
        "expected",
        Text.assemble(
            f"{share(promise.full)} of the time all of {promise.serve} serve, {share(promise.any)} at least one, ",
            f"with {promise.spares} standby" if promise.spares else "without standby",
        ),
    )
    for line in arithmetic(promise, it.target):
        yield "", Text(line, "dim")
    yield "a failure costs", Text(promise.failure_costs)
    yield "an update costs", Text(promise.update_costs)


def _available(it: ModelSla) -> Text:
    if it.availability is None:
        return Text("unknown: nothing was observed", "yellow")
    good = "green" if it.target is None or it.availability >= it.target else "bold red"
    told = Text.assemble((share(it.availability), good), f" of the known {span(it.known_s)}")
    if it.down_s:
        told.append(f"; down for {span(it.down_s)}")
    short_s = it.up_s - it.full_s
    if short_s >= 1.0:
        told.append(f"; with fewer replicas than wanted for {span(short_s)}")
    if it.unknown_s >= 1.0:
        told.append(f"; unknown for {span(it.unknown_s)}", "yellow")
    return told


def _requests(it: Requests | None) -> Text:
    if it is None or it.share is None:
        return Text("none recorded")
    told = f"{it.ok:,} of {it.counted:,} succeeded ({share(it.share)}), since {_time(it.since)}"
    others = ((it.refused, "refused because of the client"), (it.cancelled, "cancelled by the client"))
    return Text("; ".join([told, *(f"{count:,} {what}" for count, what in others if count)]))


def _budget(it: Budget, requests: Requests | None) -> Iterator[tuple[str, RenderableType]]:
    left = max(0.0, it.left_s / it.allowed_s)
    row = Table.grid(padding=(0, 1))
    style = "green" if left > 0.25 else "yellow" if left else "red"
    bar = ProgressBar(1.0, left, width=BAR_COLUMNS, complete_style=style, finished_style=style)
    over = "over by " if it.left_s < 0 else ""
    row.add_row(bar, f"{over}{span(abs(it.left_s))}{'' if over else ' left'} of {span(it.allowed_s)}")
    yield "error budget", row
    if requests is not None and it.burn is not None:
        told = f"{it.spent_requests:,} of {it.allowed_requests:,.1f} failures allowed; burn rate {it.burn:.2f}"
        yield "", Text(told, "bold red" if it.burn > 1 else "")


def _gaps(gaps: tuple[Gap, ...]) -> str:
    shown = [f"{_time(each.since)} to {_time(each.until)} ({span(each.unknown_s)})" for each in gaps[-SHOWN_MAX:]]
    more = len(gaps) - len(shown)
    return "; ".join([*([f"{more} times before"] if more else []), *shown])


def _incidents(incidents: Iterable[Incident]) -> RenderableType:
    shown = table("when (UTC)", "what", "unit", "lasted", "why", right=("lasted",))
    every = tuple(incidents)
    for each in every[-SHOWN_MAX:]:
        lasted = "" if each.lasted_s is None else span(each.lasted_s)
        shown.add_row(_time(each.at, "seconds"), each.what.replace("_", " "), each.unit, lasted, Text(each.why))
    if len(every) > SHOWN_MAX:
        shown.caption = f"and {len(every) - SHOWN_MAX} before"
    return _below(shown)


def _below(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 2))


def arithmetic(it: PromiseDocument, target: float | None) -> Iterator[str]:
    """The steps of the availability calculation."""
    failures = "1 failure" if it.failures == 1 else f"{it.failures} failures"
    yield (
        f"seen: {failures} in {span(it.replica_s)} of all replicas together, so with 95 % confidence no "
        f"more than one in {span(it.mtbf_at_least_s)}"
    )
    yield (
        f"with a prior that weighs {PRIOR_FAILURES:g} failure in {span(PRIOR_MTBF_S)} and {span(PRIOR_MTTR_S)} of "
        f"repair: one failure in {span(it.mtbf_s)} (MTBF), ready again after {span(it.mttr_s)} (MTTR)"
    )
    yield f"a replica is up for MTBF / (MTBF + MTTR) = {share(it.replica_up)} of its time"
    several = it.serve + it.spares
    tail = f"{it.serve} of {several} are up for {share(it.enough)} (binomial tail)"
    if it.spares:
        seen = f"mean of {it.promotions} seen" if it.promotions else "none seen yet"
        tail += f", less {share(it.switching)} in which a spare steps in, {seconds(it.switch_s)} each time ({seen})"
    yield tail
    if target is not None:
        fewest = "no number keeps" if it.spares_needed is None else f"{it.spares_needed} keep"
        yield f"spares: {fewest} {share(target)} for all of {it.serve}, if replicas fail one by one"


def share(value: float) -> str:
    """A share in per cent, with enough digits to differ from 0 % and 100 %."""
    for digits in range(2, DIGITS_MAX + 1):
        if value in (0.0, 1.0) or float(f"{value * 100:.{digits}f}") not in (0.0, 100.0):
            return f"{value * 100:.{digits}f} %"
    least = 10.0**-DIGITS_MAX
    return f"over {100 - least:.{DIGITS_MAX}f} %" if value > 0.5 else f"below {least:.{DIGITS_MAX}f} %"


def span(value: float) -> str:
    """A duration with a suitable unit."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if value >= 1.5 * size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.1f} s"


def seconds(value: float) -> str:
    """A short duration."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def _time(at: float, to_the: str = "minutes") -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(" ", to_the).removesuffix("+00:00")
