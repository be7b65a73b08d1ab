"""The picture of a run for the README. The only file here that imports matplotlib (extra `plot`).

python bench/gateway/chart.py [results.json] [picture.svg]
"""

import json
import sys
from pathlib import Path
from typing import Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE: Final = Path(__file__).parent
CHART: Final = HERE.parents[1] / "docs/gateway-bench.svg"
PANELS: Final = (
    ("request_1k", "cpu_us", "CPU per request of 1 KB, µs"),
    ("request_32k", "cpu_us", "CPU per request of 32 KB, µs"),
    ("ttft", "added_p50_us", "added to the first event, median µs"),
    ("event_64x1ms", "cpu_us", "CPU per event, 64 streams, µs"),
    ("event_512x5ms", "cpu_us", "CPU per event, 512 streams, µs"),
    ("memory", "stream_kb", "memory of an open stream, KB"),
)
OURS, THEIRS, CUT = "#1f77b4", "#b8bec6", "#dfe3e8"
ROOM: Final = 1.3
"""Where the axis ends: this many times the largest bar that is drawn whole."""
FAR: Final = 4.0
"""A bar that is longer than this many times the next one is cut: the others could not be told apart any more."""

Figures = dict[str, dict[str, dict[str, float]]]


def draw(results: Path, picture: Path) -> None:
    """Draw the figures of a result file. The format follows the suffix of the picture."""
    document = json.loads(results.read_text())
    figures: Figures = document["figures"]
    names = list(document["versions"])
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "forebay", "font.size": 9}):
        figure = Figure(figsize=(11, 5.6), layout="constrained")
        for axes, (scenario, key, title) in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
            found = {name: figures[name].get(scenario, {}).get(key) for name in names}
            _panel(axes, {name: value for name, value in found.items() if value is not None}, title)
        machine = document["machine"]
        figure.suptitle(
            f"Forebay's gateway beside other proxies: shorter is better (one core, Python {machine['python']}, "
            f"median of {document['rounds']} rounds)"
        )
        figure.savefig(picture, dpi=110, metadata={"Date": None} if picture.suffix == ".svg" else None)


def _panel(axes: Axes, values: dict[str, float], title: str) -> None:
    longest = sorted(values.values())
    while len(longest) > 1 and longest[-1] > FAR * longest[-2]:
        longest.pop()
    end = max([*longest[-1:], 0.0]) * ROOM or 1.0
    for at, (name, value) in enumerate(values.items()):
        cut = value > end
        ours = name.startswith("forebay")
        axes.barh(at, min(max(value, 0.0), end), color=OURS if ours else CUT if cut else THEIRS, height=0.72)
        shown = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"
        if cut:
            axes.text(end * 0.98, at, f"{shown} →", va="center", ha="right")
        else:
            axes.text(max(value, 0.0) + end * 0.015, at, shown, va="center", weight="bold" if ours else "normal")
    axes.set_yticks(range(len(values)), [name.replace("_", "-") for name in values])
    axes.set_xlim(0, end)
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.set_title(title, fontsize=9.5, loc="left")
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_visible(False)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    given = [Path(word) for word in sys.argv[1:]]
    draw(*(given + [HERE / "results.json", CHART][len(given) :]))
