"""The tables of docs/scaling.md, from results.json. A cell uses the seeds that all of its policies have."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from forebay.sim.report.figures import Estimate, estimate

PAGE: Final = Path(__file__).parents[2] / "docs" / "scaling.md"
BEGIN, END = "<!-- scaling:begin -->", "<!-- scaling:end -->"
OURS: Final = "forebay"
POLICIES: Final = (OURS, "slo", "hpa", "kpa", "apa", "static", "oracle")
NAMES: Final = {
    OURS: "`forebay`, defaults",
    "slo": "`slo` (llm-d)",
    "hpa": "`hpa` (Kubernetes)",
    "kpa": "`kpa` (Knative)",
    "apa": "`apa` (AIBrix)",
    "static": "static peak",
    "oracle": "oracle",
}
GPUS: Final = 4
"""Of one replica."""
ATTAINMENT, ORACLE_MOST, STATIC_MOST = 0.99, 1.2, 0.5
"""The goals; the last one for the week."""
THINGS: Final = (
    "The worst of the seeds; in brackets the share of all requests within the SLO. Constant loads (six hours) and the"
    " step (four hours) have the requests of the week; changes of direction in their first hour are not counted. The"
    " step is a sudden rise from 6 to 30 requests a second. Outages: no readings for twenty minutes of every two"
    " hours of the day. Failures: a replica dies every 2.4 hours of the day. Late: 25 requests a second for four"
    " hours, of which 2 % are late on any number of replicas."
)
Seeds = Mapping[str, Sequence[float]]


def tables(results: Mapping[str, Any]) -> str:
    """All of them, as Markdown."""
    parts = [_cell(name, policies) for name, policies in sorted(results["grid"].items(), key=_order)]
    parts += ["### Single effects", THINGS, _made(results["made"]), "### Error of the simulator"]
    return "\n\n".join([*parts, _agree(results["agree"])])


def _order(item: tuple[str, object]) -> tuple[bool, bool, str]:
    name = item[0]
    return "start" in name, " x1" not in name or "x1." in name, name


def _cell(name: str, policies: Mapping[str, Seeds]) -> str:
    """One workload at one step time."""
    found = {policy: policies[policy] for policy in POLICIES if policy in policies}
    seeds = sorted(set.intersection(*(set(seeds) for seeds in found.values())))
    if not seeds or not {OURS, "oracle", "static"} <= found.keys():
        return f"**{name}**: not measured yet."
    rows = []
    for policy, own in found.items():
        values = [own[seed] for seed in seeds]
        kept, hours = estimate([each[0] for each in values]), estimate([each[1] for each in values])
        to_oracle, to_static = (
            fmean([own[seed][1] / found[other][seed][1] for seed in seeds]) for other in ("oracle", "static")
        )
        rows.append([
            NAMES[policy], _percent(kept), f"{hours.mean * GPUS:,.0f}", f"{to_oracle:.2f}", f"{to_static:.2f}",
            f"{fmean([each[3] for each in values]):.1f}", f"{fmean([each[4] for each in values]):,.0f}",
            _goals(policy, name, kept.mean, to_oracle, to_static),
        ])  # fmt: skip
    head = ("", "within SLO", "GPU-hours", "of oracle", "of static", "turns/h", "starts", "goals")
    return f"**{name}** ({len(seeds)} {'seed' if len(seeds) == 1 else 'seeds'})\n\n{_table(head, rows)}"


def _goals(policy: str, cell: str, kept: float, to_oracle: float, to_static: float) -> str:
    """The goals that are missed; empty for the reference fleets."""
    if policy in {"static", "oracle"}:
        return ""
    missed = []
    if kept < ATTAINMENT:
        missed.append(f"< {ATTAINMENT * 100:.0f} %")
    if to_oracle > ORACLE_MOST:
        missed.append(f"> {ORACLE_MOST:g} oracle")
    if "week" in cell and to_static > STATIC_MOST:
        missed.append(f"> {STATIC_MOST:g} static")
    return ", ".join(missed) if missed else "met"


def _made(cells: Mapping[str, Mapping[str, Seeds]]) -> str:
    """Attainment and the figure of each cell, the worst of its seeds."""
    policies = [policy for policy in POLICIES if any(policy in own for own in cells.values())]
    rows = []
    for cell, own in sorted(cells.items()):
        row = [cell.removesuffix(" x1"), FIGURE[cell.split()[0]]]
        for policy in policies:
            seeds = own.get(policy, {})
            worst = max([each[2] for each in seeds.values()], default=0.0)
            kept = fmean([each[0] for each in seeds.values()]) if seeds else 0.0
            row.append(f"{worst:,.3g} ({kept * 100:.1f} %)" if seeds else "")
        rows.append(row)
    return _table(("", "figure", *(NAMES[policy] for policy in policies)), rows)


FIGURE: Final = {
    "constant": "changes of direction per hour; goal: at most 2",
    "step": "seconds until the SLO is met again; goal: at most 158, a start and a minute",
    "outages": "times that replicas were removed while the load was unknown; goal: 0",
    "failures": "changes of direction per hour",
    "late": "mean number of replicas",
}


def _agree(cells: Mapping[str, Mapping[str, Seeds]]) -> str:
    rows, apart = [], []
    for cell, counts in sorted(cells.items()):
        for count, seeds in sorted(counts.items(), key=lambda item: int(item[0])):
            for replayed, fleet in seeds.values():
                rows.append(
                    [
                        cell,
                        count,
                        f"{replayed * 100:.1f} %",
                        f"{fleet * 100:.1f} %",
                        f"{(fleet - replayed) * 100:+.1f}",
                    ]
                )
                apart.append(abs(fleet - replayed) * 100)
    if not rows:
        return ""
    text = f"The two differ by {fmean(apart):.1f} percentage points on average, by {max(apart):.1f} at most."
    return _table(("", "replicas", "replay", "fleet", "points"), rows) + "\n\n" + text


def _percent(found: Estimate) -> str:
    """With the half width of the interval, if it is known."""
    spread = f" ± {found.half_width * 100:.2f}" if found.half_width else ""
    return f"{found.mean * 100:.2f}{spread} %"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(results: Mapping[str, Any]) -> None:
    """Put the tables into the page."""
    page = PAGE.read_text()
    before, after = page[: page.index(BEGIN)], page[page.index(END) :]
    PAGE.write_text(f"{before}{BEGIN}\n{tables(results)}\n{after}")
