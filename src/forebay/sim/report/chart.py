"""Line charts as SVG, and their values, from which other charts can be drawn.

Colours come from the page: series n has the class `s<n>`, so that a dark theme can choose others.
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Final, NamedTuple

WIDTH, HEIGHT = 560, 320
LEFT, RIGHT, TOP, BOTTOM = 52, 24, 46, 44
"""Margins for labels."""
SMALLEST: Final = 1e-300
"""Smaller values count as 0, as tick steps for them would underflow."""
TICKS: Final = 6
LEGEND_ROW: Final = 16
COLOURS: Final = 8
"""Colour classes that a page must define; further series reuse them with dashed lines."""


class Series(NamedTuple):
    """A named line. `steps`: each value holds until the next one. `faint`: for comparison only."""

    name: str
    points: Sequence[tuple[float, float]]
    steps: bool = False
    faint: bool = False


class Chart(NamedTuple):
    """A chart; axes begin at 0. `log_x`: logarithmic x axis, beginning at the decade of the smallest positive
    value."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    log_x: bool = False
    y_max: float | None = None
    """None: automatic."""


class _Axis(NamedTuple):
    place: Callable[[float], float]
    ticks: Sequence[float]


def svg(chart: Chart) -> str:
    """The chart as an element for an HTML page; an empty plot without values."""
    across, up = _x_axis(chart), _y_axis(chart)
    legend = LEGEND_ROW * len(chart.series)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT + legend}" role="img" aria-label="{escape(chart.title)}">',
        _text(LEFT, 16, chart.title, "title"),
        *(_grid(across, up)),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, chart.x, "axis", "middle"),
        _text(LEFT, TOP - 10, chart.y, "axis"),
    ]
    for number, series in enumerate(chart.series):
        look = f"s{number % COLOURS}{' faint' if series.faint else ''}{' broken' if number >= COLOURS else ''}"
        line = _line(series, across, up)
        if line:
            parts.append(f'<path class="{look}" d="{line}"><title>{escape(series.name)}</title></path>')
        below = HEIGHT + LEGEND_ROW * number + 4
        parts.append(f'<path class="{look}" d="M{LEFT} {below}h22"/>')
        parts.append(_text(LEFT + 30, below + 4, series.name, "name"))
    return "".join([*parts, "</svg>"])


def decades(chart: Chart) -> tuple[float, float]:
    """The powers of ten that enclose the x values of a chart; always two different ones."""
    values = [x for series in chart.series for x, _ in series.points if x >= SMALLEST]
    low, high = math.floor(math.log10(min(values, default=0.1))), math.ceil(math.log10(max(values, default=1.0)))
    return 10.0**low, 10.0 ** max(high, low + 1)


def _x_axis(chart: Chart) -> _Axis:
    values = [x for series in chart.series for x, _ in series.points]
    most = _most(values)
    wide = WIDTH - LEFT - RIGHT
    if not chart.log_x:
        return _Axis(lambda x: LEFT + wide * x / most, steps(most))
    low, high = (round(math.log10(end)) for end in decades(chart))

    def place(x: float) -> float:
        return LEFT + wide * (max(0.0, math.log10(x) - low) if x > 0 else 0.0) / (high - low)

    return _Axis(place, [10.0**decade for decade in range(low, high + 1)])


def _y_axis(chart: Chart) -> _Axis:
    most = chart.y_max or _most([y for series in chart.series for _, y in series.points])
    ticks = steps(most)
    top = chart.y_max or (ticks[-1] if ticks[-1] >= most else ticks[-1] + ticks[1])
    return _Axis(lambda y: HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * min(y, top) / top, ticks)


def _most(values: Sequence[float]) -> float:
    """The largest value, or 1 if it is indistinguishable from 0."""
    most = max(values, default=0.0)
    return most if most >= SMALLEST else 1.0


def steps(most: float) -> list[float]:
    """Ticks from 0 to `most` (above 0) in round steps (1, 2 or 5 times a power of ten), about `TICKS` of them."""
    rough = most / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [step * number for number in range(math.floor(most / step * (1 + 1e-9)) + 1)]


def _grid(across: _Axis, up: _Axis) -> list[str]:
    floor_y, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in up.ticks:
        y = up.place(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{tick:g}", "tick", "end"))
    for tick in across.ticks:
        x = across.place(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{floor_y}"/>')
        parts.append(_text(x, floor_y + 16, f"{tick:g}", "tick", "middle"))
    return parts


def _line(series: Series, across: _Axis, up: _Axis) -> str:
    places = [(f"{across.place(x):.1f}", f"{up.place(y):.1f}") for x, y in series.points]
    if not places:
        return ""
    (x, y), *rest = places
    drawn = [f"H{x}V{y}" if series.steps else f"L{x} {y}" for x, y in rest]
    return f"M{x} {y}{''.join(drawn)}"


def _text(x: float, y: float, words: str, look: str, anchor: str = "start") -> str:
    return f'<text class="{look}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
