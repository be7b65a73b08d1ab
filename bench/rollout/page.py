"""The tables of docs/rollouts.md, from results.json."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
PARTS: Final = ("centre", "tail", "rate", "score")
OURS: Final = "forebay"
HARMLESS: Final = "as good"
Found = Mapping[str, Any]


def tables(results: Mapping[str, Any]) -> str:
    """All of them, as Markdown."""
    parts = ["### Guarantees", *_held(results["held"]), "### Rollouts", *_rollouts(results["rollouts"])]
    return "\n\n".join([*parts, "### Power", *_power(results["power"])])


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Write them between the markers of the page."""
    text = path.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n\n{tables(results)}\n\n{END}{after}")


def _held(cells: Mapping[str, Found]) -> list[str]:
    rows = []
    for name, cell in cells.items():
        for part in PARTS:
            if f"{part} worse" in cell["found"]:
                label = f"{name}: {part}" if part == "tail" else name
                shares = [_share(cell, f"{part} worse"), _share(cell, f"{part} fine")]
                rows.append([label, *shares, _share(cell, "interval") if part != "tail" else ""])
    repeats = min(cell["repeats"] for cell in cells.values())
    lead = (
        "Canaries exactly at the tolerance, ten minutes at 10 requests/s, judged after every observation,"
        f" {repeats} or more of each. The guarantee is at most 5 %, for each column and part separately;"
        " in 100 trials, a true 5 % may be observed as 1 to 10 %:"
    )
    return [lead, _table(["canary", "called worse", "called fine", "interval missed the truth"], rows)]


def _share(cell: Found, name: str) -> str:
    return f"{100 * cell['found'][name] / cell['repeats']:.1f} %" if name in cell["found"] else ""


def _rollouts(cells: Mapping[str, Found]) -> list[str]:
    judges = list(cells[HARMLESS]["found"])
    healthy = [name for name in cells if name.startswith(HARMLESS)]
    alarms = [[name, *(_of_1000(cells[name]["found"][judge]) for judge in judges)] for name in healthy]
    harmful = [name for name in cells if name not in healthy]
    found = [[name, *(_detected(cells[name]["found"][judge]) for judge in judges)] for name in harmful]
    ours = [[name, *_promoted(cells[name]["found"][OURS])] for name in healthy]
    counts = ", ".join(f"{cells[name]['repeats']} of “{name}”" for name in healthy)
    return [
        "10 requests/s of which the canary gets 5 %, for at most three hours. False alarms among 1,000 healthy"
        f" rollouts (from {counts}):",
        _table(["canary", *judges], alarms),
        f"Harm found, and the median time to detection ({cells[harmful[0]]['repeats']} of each):",
        _table(["canary", *judges], found),
        "Time until `forebay` promoted the healthy ones; the others promote after a fixed 30 or 180 minutes:",
        _table(["canary", "promoted", "median", "nine of ten"], ours),
    ]


def _of_1000(row: Found) -> str:
    return f"{1000 * row['rolled_back'] / row['rollouts']:.0f}"


def _detected(row: Found) -> str:
    share = f"{100 * row['rolled_back'] / row['rollouts']:.0f} %"
    return f"{share}, {_minutes(row['minutes'])}" if row["minutes"] is not None else share


def _promoted(row: Found) -> list[str]:
    share = f"{100 * row['promoted'] / row['rollouts']:.0f} %"
    return [share, _minutes(row["minutes"]), _minutes(row["minutes_90"])]


def _power(cells: Mapping[str, Found]) -> list[str]:
    rows = []
    for name, cell in cells.items():
        row = cell["found"]
        shares = [f"{100 * row[key] / row['rollouts']:.0f} %" for key in ("rolled_back", "promoted")]
        rows.append([name, *shares, _minutes(row["minutes"]), _minutes(row["minutes_90"])])
    repeats = min(cell["repeats"] for cell in cells.values())
    lead = f"The same traffic, `forebay` only, {repeats} of each, with 1.02 times the TTFT tolerated:"
    return [lead, _table(["harm", "rolled back", "promoted", "median", "nine of ten"], rows)]


def _minutes(value: float | None) -> str:
    return "more" if value is None else f"{value:.0f} min" if value >= 10 else f"{value:.1f} min"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
