"""`forebay simulate --calibration`: the errors of the engine model against measurements, and its caveats."""

from collections.abc import Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forebay.cli.settings import screen
from forebay.sim.engine import rows
from forebay.sim.engine.calibration import CAVEATS, Errors, errors

COLUMNS = ("measured", "figure", "points", "mean error", "p95 error", "measured/predicted")
LEFT = COLUMNS[:2]


def calibration(as_json: bool) -> int:
    """Print the errors; returns the exit code."""
    with screen(stderr=True).status("simulating what was measured"):
        found = errors()
    known = [row.name for row in rows()]
    output = screen()
    if as_json:
        document = {"errors": [each._asdict() for each in found], "caveats": CAVEATS, "hardware": known}
        output.out(msgspec.json.format(msgspec.json.encode(document)).decode(), highlight=False)
    else:
        output.print(view(found, known))
    return 0


def view(found: Sequence[Errors], known: Sequence[str]) -> RenderableType:
    """The errors, the caveats, and the known hardware."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=name not in LEFT)
    for subset, what, points, mean, p95, ratio in found:
        table.add_row(Text(subset), Text(what), f"{points}", f"{mean:.1%}", f"{p95:.1%}", f"{ratio:.2f}")
    caveats = Table.grid(padding=(0, 1))
    for caveat in CAVEATS:
        caveats.add_row("-", Text(caveat))
    return Group(
        Text("How far the engine model is from what was measured end to end\n", style="bold"),
        table,
        Text("\nWhat this does not say\n", style="bold"),
        caveats,
        Text("\nStep times are known for\n", style="bold"),
        Text(", ".join(known)),
    )
