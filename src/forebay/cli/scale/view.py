"""Formats scaling: a line per model, or everything that led to one model's number of replicas."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forebay.cli.deploy.view import span, time
from forebay.cli.view.table import table
from forebay.control.api.documents import ScalingDocument
from forebay.control.scaling.state import DecisionRecord, Setting
from forebay.control.scaling.values import LimitUse

MODES = {"fixed": "dim", "auto": "green", "shadow": "cyan", "set": "yellow"}
NAMES = {"gpus": "GPUs"}
RIGHT = ("replicas", "wanted", "starts in")


def overview(models: Iterable[ScalingDocument], limits: Sequence[LimitUse] = ()) -> RenderableType:
    """A line per model, and one for the limits that they share."""
    shown = table("model", "mode", "replicas", "wanted", "bounds", "starts in", "why", right=RIGHT)
    for it in models:
        shown.add_row(
            Text(it.model, "bold"),
            _mode(it),
            str(it.replicas),
            str(it.wanted),
            _bounds(it),
            span(it.cold_start_s),
            _why(it),
        )
    if not limits:
        return shown
    used = ", ".join(f"{each.used:g} of {each.most:g} {NAMES.get(each.name, each.name)}" for each in limits)
    return Group(shown, Text(f"limits: {used}", "yellow" if any(_is_reached(each) for each in limits) else "dim"))


def _is_reached(limit: LimitUse) -> bool:
    return limit.used >= limit.most


def explained(it: ScalingDocument, last: int, *, everything: bool) -> RenderableType:
    """Why a model has the replicas that it has."""
    return Group(*_parts(it, last, everything))


def _parts(it: ScalingDocument, last: int, everything: bool) -> Iterator[RenderableType]:
    yield Text.assemble((it.model, "bold"), "  ", _mode(it), f"  {_count(it.replicas)}", _would(it))
    if it.mode == "fixed":
        yield _indented("It has no `scale` in the cluster file: the number of replicas is fixed by `replicas`.")
    elif it.decision is not None:
        yield _indented(f"{it.decision.reason}: {it.decision.why}")
    else:
        yield _indented("No decision yet.")
    yield Text()
    yield Padding(_facts(it), (0, 0, 0, 2), expand=False)
    told = [each for each in it.decisions if everything or each.wanted != each.before]
    if told:
        yield Text()
        yield Text("decisions" if everything else "last changes", "bold")
        yield _decisions(told[-last:])
    if it.trouble:
        yield Text(f"\nthe store is unavailable, scaling continues in memory: {it.trouble}", "yellow")


def _facts(it: ScalingDocument) -> Table:
    """Bounds, overrides, and all figures of the last decision."""
    facts = Table.grid(padding=(0, 2))
    facts.add_row("bounds", _bounds(it))
    facts.add_row("cold start", f"{span(it.cold_start_s)}" if it.cold_start_s is not None else "not measured yet")
    if it.setting is not None:
        facts.add_row("set", Text(_set(it.setting)))
    if it.decision is not None:
        facts.add_row("decided", f"{time(it.decision.until)} UTC, the same since {time(it.decision.at)}")
        for name, value in it.decision.figures.items():
            facts.add_row(name, f"{value:,.6g}")
    return facts


def _decisions(told: Iterable[DecisionRecord]) -> Table:
    shown = table("at (UTC)", "from", "to", "reason", "why", right=("from", "to"))
    for each in told:
        wanted = Text(str(each.wanted), "green" if each.wanted > each.before else "")
        reason = each.reason if each.done else f"{each.reason} (shadow)"
        shown.add_row(time(each.at), str(each.before), wanted, reason, each.why)
    return shown


def _mode(it: ScalingDocument) -> Text:
    policy = f" ({it.policy})" if it.mode in ("auto", "shadow") and it.policy else ""
    return Text(f"{it.mode}{policy}", MODES.get(it.mode, ""))


def _bounds(it: ScalingDocument) -> str:
    return "none" if it.min is None or it.max is None else f"{it.min} to {it.max}"


def _why(it: ScalingDocument) -> str:
    return f"{it.decision.reason}: {it.decision.why}" if it.decision is not None and it.mode != "fixed" else ""


def _would(it: ScalingDocument) -> str:
    return f", {it.wanted} would be wanted" if it.mode == "shadow" and it.wanted != it.replicas else ""


def _set(setting: Setting) -> str:
    named = (("replicas", setting.replicas), ("min", setting.min), ("max", setting.max))
    what = ", ".join(f"{name} {value}" for name, value in named if value is not None)
    return f"{what} by {setting.by} at {time(setting.at)} UTC{f': {setting.why}' if setting.why else ''}"


def _count(replicas: int) -> str:
    return "1 replica" if replicas == 1 else f"{replicas} replicas"


def _indented(text: str) -> Padding:
    return Padding(Text(text), (0, 0, 0, 2))
