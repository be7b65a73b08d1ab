"""The tables of docs/routing.md, from results.json. A cell is shown when all of its seeds are done."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from forebay.sim.report.figures import Estimate, estimate

BEGIN, END = "<!-- grid:begin -->", "<!-- grid:end -->"
OURS: Final = "cpr"
YARDSTICK: Final = "oracle"
AS_IS: Final = "as it is"
RIVALS_EVERYWHERE: Final = ("plain_least_requests", "llm_d", "lmetric")
TUNED_EVERYWHERE: Final = ("dynamo", "gie", "llm_d", "smg_cache_aware")
GOODPUT, TTFT = "goodput", "ttft_mean_s"
PUBLISHED_S: Final = {"plain_random": 19.65, "plain_least_requests": 5.27, "smg_cache_aware": 3.58, OURS: 3.07}
"""Mean times to the first token in figure 5 of Mooncake's paper (Qin et al., FAST'25); ours stands for its own."""
GOALS: Final = {"plain_random": 0.16, "plain_least_requests": 0.60}
_NAMES: Final = {"plain_random": "random", "plain_least_requests": "load only"}
IMBALANCE_MAX: Final = 1.15
Seeds = Mapping[str, Sequence[float]]
Policies = Mapping[str, Seeds]


class Grid:
    """Cells of results."""

    def __init__(self, results: Mapping[str, Any], part: str = "grid") -> None:
        self._figures: list[str] = results["figures"]
        cells: Mapping[str, Policies] = results[part]
        most = max([len(seeds) for policies in cells.values() for seeds in policies.values()], default=0)
        self.cells = {
            cell: {policy: seeds for policy, seeds in policies.items() if len(seeds) == most}
            for cell, policies in sorted(cells.items())
        }
        self.seeds = most

    def mean(self, cell: str, policy: str, figure: str) -> Estimate:
        """Of one policy, over the seeds."""
        at = self._figures.index(figure)
        return estimate([values[at] for values in self.cells[cell][policy].values()])

    def less(self, cell: str, policy: str, figure: str) -> Estimate:
        """Ours less this one, paired by seed."""
        at = self._figures.index(figure)
        ours, theirs = self.cells[cell][OURS], self.cells[cell][policy]
        return estimate([ours[seed][at] - values[at] for seed, values in sorted(theirs.items())])

    def has(self, cell: str, policy: str) -> bool:
        """Whether there is something to compare."""
        return {OURS, policy} <= self.cells.get(cell, {}).keys()

    def of_change(self, change: str) -> list[str]:
        """Cells with this change."""
        return [cell for cell in self.cells if cell.endswith(f", {change}") and OURS in self.cells[cell]]


def tables(results: Mapping[str, Any]) -> str:
    """All of them, as Markdown."""
    grid = Grid(results)
    experiment = Grid(results, "published")
    parts = [
        f"Goodput, {grid.seeds} seeds; in brackets the advantage of `cpr`, in percentage points:",
        _as_is(grid, GOODPUT),
        "Mean time to the first token, seconds; in brackets `cpr` minus the other (negative: `cpr` is better):",
        _as_is(grid, TTFT),
        "Other clusters. Goodput of `cpr`, and its advantage over each of the others, in percentage points:",
        _changed(grid, results["best"]),
        "Over all cells of both tables, how often `cpr` is clearly better / not clearly different / clearly worse:",
        _counts(grid),
        "Settings with the most goodput, chosen on separate draws:",
        _best(results["best"]),
        "### The experiment of Mooncake's figure 5",
        f"Mean time to the first token over the whole conversation trace, seconds ({experiment.seeds} seeds), and"
        " prompt tokens computed by the busiest replica over the mean:",
        _published(experiment),
        _goals(experiment),
    ]
    return "\n\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _look(text: str, difference: Estimate, better: int) -> str:
    """Bold: the other one is clearly better; italics: neither is."""
    if not difference.is_clear:
        return f"*{text}*"
    return text if difference.mean * better > 0 else f"**{text}**"


def _difference(found: Estimate, figure: str) -> str:
    size, digits = (100, 1) if figure == GOODPUT else (1, 2)
    return f"{found.mean * size:+.{digits}f} ± {(found.half_width or 0.0) * size:.{digits}f}"


def _value(found: Estimate, figure: str) -> str:
    return f"{found.mean * 100:.1f} %" if figure == GOODPUT else f"{found.mean:.2f}"


def _as_is(grid: Grid, figure: str) -> str:
    cells = grid.of_change(AS_IS)
    names = sorted({policy for cell in cells for policy in grid.cells[cell]} - {OURS, YARDSTICK})
    rows = []
    for policy in (OURS, *names, YARDSTICK):
        row = [f"`{policy}`"]
        for cell in cells:
            if not grid.has(cell, policy):
                row.append("")
                continue
            value = _value(grid.mean(cell, policy, figure), figure)
            less = grid.less(cell, policy, figure)
            text = f"{value} ({_difference(less, figure)})"
            row.append(value if policy == OURS else _look(text, less, 1 if figure == GOODPUT else -1))
        rows.append(row)
    return _table(["", *(cell.split(", ")[0] for cell in cells)], rows)


def _changed(grid: Grid, best: Mapping[str, Mapping[str, str]]) -> str:
    tuned = [rival for rival in TUNED_EVERYWHERE if any(rival in own for own in best.values())]
    rows = []
    for cell in sorted(grid.cells, key=lambda cell: cell.split(", ")[::-1]):
        load, change = cell.split(", ")
        if change == AS_IS or OURS not in grid.cells[cell]:
            continue
        own = best[load.rsplit(" ", 1)[0]]
        row = [change, load, _value(grid.mean(cell, OURS, GOODPUT), GOODPUT)]
        for policy in (*RIVALS_EVERYWHERE, *(own[rival] for rival in tuned)):
            if grid.has(cell, policy):
                less = grid.less(cell, policy, GOODPUT)
                row.append(_look(_difference(less, GOODPUT), less, 1))
            else:
                row.append("")
        rows.append(row)
    names = (*(f"`{rival}`" for rival in RIVALS_EVERYWHERE), *(f"`{rival}`, best setting" for rival in tuned))
    return _table(["", "", "`cpr`", *names], rows)


def verdict(difference: Estimate, better: int) -> int:
    """1: ours is clearly better, -1: clearly worse, 0: neither."""
    if not difference.is_clear:
        return 0
    return 1 if difference.mean * better > 0 else -1


def _counts(grid: Grid) -> str:
    names = sorted({policy for policies in grid.cells.values() for policy in policies} - {OURS, YARDSTICK})
    rows = []
    for policy in names:
        cells = [cell for cell in grid.cells if grid.has(cell, policy)]
        row = [f"`{policy}`", str(len(cells))]
        for figure, better in ((GOODPUT, 1), (TTFT, -1)):
            found = [verdict(grid.less(cell, policy, figure), better) for cell in cells]
            row.append(" / ".join(str(found.count(each)) for each in (1, 0, -1)))
        rows.append(row)
    return _table(["", "cells", "goodput", "mean time to first token"], rows)


def _best(best: Mapping[str, Mapping[str, str]]) -> str:
    tuned = sorted({rival for rivals in best.values() for rival in rivals})
    rows = [[kind, *(f"`{rivals[rival]}`" for rival in tuned)] for kind, rivals in sorted(best.items())]
    return _table(["", *(f"`{rival}`" for rival in tuned)], rows)


def _published(grid: Grid) -> str:
    rows = [["the paper's own", *(f"{seconds:.2f}" for seconds in PUBLISHED_S.values())]]
    for title, policies in grid.cells.items():
        if policies.keys() >= PUBLISHED_S.keys():
            times = [grid.mean(title, policy, TTFT).mean for policy in PUBLISHED_S]
            work = [grid.mean(title, policy, "imbalance").mean for policy in PUBLISHED_S]
            rows.append([title, *(f"{t:.2f} (work {w:.2f})" for t, w in zip(times, work, strict=True))])
    names = ("random", "by load only", "cache-aware, local", "global: Mooncake's own; ours: `cpr`")
    return _table(["", *names], rows)


def _goals(grid: Grid) -> str:
    lines = []
    for title, policies in grid.cells.items():
        if not policies.keys() >= PUBLISHED_S.keys():
            continue
        ours = grid.mean(title, OURS, TTFT).mean
        ratios = {policy: ours / grid.mean(title, policy, TTFT).mean for policy in GOALS}
        work = grid.mean(title, OURS, "imbalance").mean
        words = [f"{ratio:.2f} of {_NAMES[policy]}{_met(ratio <= GOALS[policy])}" for policy, ratio in ratios.items()]
        lines.append(f"- {title}: {', '.join(words)}, work {work:.2f}{_met(work <= IMBALANCE_MAX)}")
    theirs = [f"{PUBLISHED_S[OURS] / PUBLISHED_S[policy]:.2f} of {_NAMES[policy]}" for policy in GOALS]
    goals = [f"at most {most:.2f} of {_NAMES[policy]}" for policy, most in GOALS.items()]
    head = f"`cpr` takes, where the paper's own takes {' and '.join(theirs)}, and the goals are {' and '.join(goals)}"
    return "\n".join([f"{head}, and work of at most {IMBALANCE_MAX}:", "", *lines])


def _met(met: bool) -> str:
    return " (met)" if met else " (missed)"


def generated(page: str) -> str:
    """The part of a page that the tables are in."""
    return page[page.index(BEGIN) + len(BEGIN) : page.index(END)].strip()


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Write the tables into the page."""
    page = path.read_text()
    before, after = page[: page.index(BEGIN)], page[page.index(END) :]
    path.write_text(f"{before}{BEGIN}\n{tables(results)}\n{after}")
