"""Formats a rollout: its phase, its replicas, its metrics, and what is still missing for a verdict."""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from forebay.cli.view.table import table
from forebay.control.api.documents import EffectDocument, FindingDocument, RolloutDocument, VerdictDocument
from forebay.core.deploy.course import Kind
from forebay.core.deploy.rollout import Phase
from forebay.core.rollout.values import Decision, Finding

PHASES = {
    Phase.STARTING: "cyan",
    Phase.COMPARING: "cyan",
    Phase.SETTLING: "green",
    Phase.PROMOTED: "bold green",
    Phase.ROLLED_BACK: "bold red",
    Phase.JUDGED: "bold",
}
FINDINGS = {Finding.WORSE: "bold red", Finding.FINE: "green", Finding.OPEN: "yellow"}
DECISIONS = {Decision.PROMOTE: "green", Decision.ROLLBACK: "bold red", Decision.INCONCLUSIVE: "yellow"}
BAR_COLUMNS = 40
UNITS = ((86_400, "d"), (3600, "h"), (60, "min"))


def blocks(rollouts: Iterable[RolloutDocument]) -> RenderableType:
    """Several rollouts, one below the other."""
    parts = [part for each in rollouts for part in (Text(), block(each))]
    return Group(*parts[1:]) if parts else Text("No rollout yet: `forebay deploy MODEL --revision R` starts one.")


def block(it: RolloutDocument) -> RenderableType:
    """All details of a rollout."""
    return Group(*_lines(it))


def _lines(it: RolloutDocument) -> Iterator[RenderableType]:
    yield Text.assemble((it.id, "bold"), f"  {it.kind}  {it.stable} → {it.canary}  ", (phase(it), PHASES[it.phase]))
    if it.why:
        yield _indented(Text(it.why))
    if not it.ended:
        yield _share(it)
        yield _replicas(it)
    if it.samples and it.kind is Kind.AB:
        yield _effects(it.effects)
    elif it.verdict is not None and any(each.canary_samples for each in it.verdict.findings):
        yield _findings(it.verdict.findings)
        if not it.ended:
            yield _indented(_verdict(it, it.verdict))
    yield Text(f"  begun {time(it.created_at)} UTC by {it.created_by}; {it.samples:,} requests compared", "dim")


def _indented(text: Text) -> Padding:
    return Padding(text, (0, 0, 0, 2))


def phase(it: RolloutDocument) -> str:
    """The phase of a rollout, in words."""
    words = it.phase.value.replace("_", " ")
    if it.phase is Phase.COMPARING and len(it.steps) > 1:
        words += f", step {it.step + 1} of {len(it.steps)}"
    if it.ended:
        return words
    if it.paused:
        return f"{words}, paused"
    return f"{words}, {span(it.time_left_s)} left" if it.time_left_s is not None else words


def _share(it: RolloutDocument) -> RenderableType:
    share = it.mirrored or it.share
    what = "of the requests are copied to it" if it.kind is Kind.SHADOW else "of the traffic"
    row = Table.grid(padding=(0, 1))
    row.add_row("  " + it.canary, ProgressBar(1.0, share, width=BAR_COLUMNS), f"{share:.0%} {what}")
    return row


def _replicas(it: RolloutDocument) -> Text:
    arms = ((it.canary, it.canary_ready, it.canary_wanted), (it.stable, it.stable_ready, it.stable_wanted))
    counts = (f"{name} {'?' if ready is None else ready} of {wanted}" for name, ready, wanted in arms)
    return Text(f"  ready replicas: {', '.join(counts)}")


def _findings(findings: Iterable[FindingDocument]) -> Table:
    shown = table("  metric", "part", "says", "seen", "samples", "lacking", right=("samples", "lacking"))
    for each in findings:
        needed = _count(each.needed_samples) if each.finding is Finding.OPEN and each.required else ""
        style = FINDINGS[each.finding] if each.required or each.finding is Finding.WORSE else "dim"
        shown.add_row(
            f"  {each.metric}",
            each.part,
            Text(each.finding, style),
            each.seen,
            f"{each.canary_samples:,}",
            needed,
        )
    return shown


def _verdict(it: RolloutDocument, verdict: VerdictDocument) -> Text:
    text = Text.assemble((verdict.decision, DECISIONS[verdict.decision]), f": {verdict.reason}")
    if verdict.decision is Decision.INCONCLUSIVE and verdict.needed_samples:
        in_time = f", about {span(verdict.needed_s)} at this traffic" if verdict.needed_s else ""
        text.append(f"\nabout {_count(verdict.needed_samples)} more requests to {it.canary} are needed{in_time}")
    return text


def _effects(effects: Iterable[EffectDocument]) -> Table:
    shown = table("  metric", "effect", "estimate", "from", "to", right=("estimate", "from", "to"))
    for each in effects:
        bounds = ("?" if value is None else f"{value:.3f}" for value in (each.estimate, each.low, each.high))
        shown.add_row(f"  {each.metric}", each.kind, *bounds)
    return shown


def line(it: RolloutDocument) -> str:
    """A rollout in one line, for logs."""
    return f"{it.id}  {it.phase.value.replace('_', ' ')}  {it.mirrored or it.share:.0%}  {it.why}"


def past(rollouts: Iterable[RolloutDocument]) -> RenderableType:
    """One line for each rollout."""
    shown = table(
        "rollout",
        "kind",
        "from",
        "to",
        "came to",
        "begun (UTC)",
        "by",
        "why",
        whole=("rollout", "kind", "from", "to"),
    )
    for it in rollouts:
        words = Text(it.phase.value.replace("_", " "), PHASES[it.phase])
        shown.add_row(it.id, it.kind, it.stable, it.canary, words, time(it.created_at), it.created_by, it.why)
    return shown if shown.row_count else Text("No rollout has ended yet.")


def span(seconds: float | None) -> str:
    """A duration with a suitable unit."""
    if seconds is None:
        return "?"
    for size, unit in UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def time(at: float) -> str:
    """A point in time, UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")


def _count(samples: float | None) -> str:
    return "?" if samples is None else f"{samples:,.0f}"
