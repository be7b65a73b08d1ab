"""Tables of metrics, for page and screen: a row per policy."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from forebay.sim.report.facts import Scope
from forebay.sim.report.figures import FIGURES, Estimate, Row, Unit, shown, shown_difference, shown_distance

IN_TABLE: Final = (
    "goodput", "goodput_per_s", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "tpot_p50_s", "tpot_p90_s",
    "tpot_p99_s", "e2e_p50_s", "e2e_p90_s", "e2e_p99_s", "cache_hit", "imbalance", "refused", "gpu_hours", "cost",
)  # fmt: skip
"""Metrics that are shown; JSON has all."""
OF_FLEETS: Final = (
    "goodput", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "tpot_p50_s", "tpot_p90_s", "tpot_p99_s", "e2e_p50_s",
    "e2e_p90_s", "e2e_p99_s", "cache_hit", "refused", "replicas_mean", "replicas_max", "turns", "gpu_hours", "cost",
)  # fmt: skip
"""The same where fleets of different sizes stand beside each other."""
COMPARED: Final = ("goodput", "ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "tpot_p99_s", "e2e_p50_s", "cache_hit")
"""Figures of which differences to the first policy are shown."""
COMPARED_OF_FLEETS: Final = ("goodput", "ttft_p99_s", "tpot_p99_s", "refused", "turns", "gpu_hours", "cost")


class Cell(NamedTuple):
    """A figure in a table."""

    text: str
    margin: str = ""
    """Half-width of its interval: `± 0.4%`; empty: nothing is known of it."""
    look: str = ""
    """`better`, `worse` or empty."""


class Table(NamedTuple):
    """Figures. Every line has as many cells as there are columns."""

    columns: Sequence[str]
    lines: Sequence[tuple[str, Sequence[Cell]]]
    head: str = "policy"
    """Of the first column."""


def title(scale: float, scope: Scope) -> str:
    """What stands over the figures of a scale; empty where there is no other."""
    return "" if tuple(scope.scales) == (1.0,) else f"Step times x {scale:g}"


def tables(rows: Sequence[Row], scope: Scope, scale: float) -> tuple[Table, Table | None]:
    """The figures of a scale, and where several seeds allow it what is different from the first policy."""
    rows = [row for row in rows if row.scale == scale]
    names = [name for name in (OF_FLEETS if scope.fleets else IN_TABLE) if any(name in row.figures for row in rows)]
    head = "fleet" if scope.fleets else "policy"
    main = Table(_labels(names), [(row.name, [_cell(row, name) for name in names]) for row in rows], head)
    if len(scope.seeds) < 2 or len(rows) < 2:
        return main, None
    names = [name for name in (COMPARED_OF_FLEETS if scope.fleets else COMPARED) if name in names]
    compared = [(row.name, [_difference(name, row.against[name]) for name in names]) for row in rows[1:]]
    return main, Table(_labels(names), compared, head)


def refusals(rows: Sequence[Row], scale: float) -> list[str]:
    """What became of requests that were not answered, in a sentence for each policy that has any."""
    return [
        f"{row.name}: {', '.join(f'{code} {count:,.4g}' for code, count in row.refused.items())}"
        for row in rows
        if row.scale == scale and row.refused
    ]


def _labels(names: Sequence[str]) -> list[str]:
    return [FIGURES[name].label for name in names]


def _cell(row: Row, name: str) -> Cell:
    found, unit = row.figures[name], FIGURES[name].unit
    return Cell(shown(found.mean, unit), _margin(found, unit, shown))


def _margin(found: Estimate, unit: Unit, text: Callable[[float, Unit], str]) -> str:
    return "" if found.half_width is None else f"± {text(found.half_width, unit)}"


def _difference(name: str, found: Estimate) -> Cell:
    figure = FIGURES[name]
    look = ""
    if found.is_clear and figure.better:
        look = "better" if found.mean * figure.better > 0 else "worse"
    return Cell(shown_difference(found.mean, figure.unit), _margin(found, figure.unit, shown_distance), look)
