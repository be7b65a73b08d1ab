"""The page of all benchmarks, and their part of the README."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from forebay.cli.measured import gateway, gpu, path, priority, server
from forebay.cli.measured.tables import Table, text

PATH: Final = "docs/benchmarks.md"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
NOT_MEASURED: Final = "_Not measured yet: run `make bench`, then `make docs`._\n"
CHART: Final = "docs/gateway-bench.svg"
"""Drawn by `bench/gateway/run.py`."""
Reader = Callable[[bytes], list[Table]]
SUMMARY: Final[tuple[tuple[str, Reader], ...]] = (
    ("gateway/results.json", gateway.costs),
    ("path/results.json", path.tables),
    ("server/results.json", server.summary),
)
"""Tables of the README: result files below `bench`, and their readers."""
ALL: Final[tuple[tuple[str, Reader], ...]] = (
    ("gateway/results.json", gateway.costs),
    ("gateway/results.json", gateway.goals),
    ("gateway/since.json", gateway.since),
    ("gateway/elsewhere.json", gateway.elsewhere),
    ("gateway/slow.json", gateway.elsewhere),
    ("gateway/xeon.json", gateway.elsewhere),
    ("gateway/behaviour.json", gateway.behaviour),
    ("path/results.json", path.tables),
    ("priority/results.json", priority.tables),
    ("server/results.json", server.tables),
    ("server/epyc.json", server.elsewhere),
    ("gpu/results.json", gpu.tables),
)
INTRODUCTION: Final = """# Benchmarks

`make bench` measures Forebay and comparable systems in one run on the same cores, and writes this page from the
results, which are kept next to the programs in `bench/`. Machines differ, so ratios are more meaningful than times.
Goals are shown with the values reached. Figures of routing, rollouts and scaling are simulated, on their own pages:
[routing](routing.md), [rollouts](rollouts.md), [scaling](scaling.md).
"""


def summary(bench: Path) -> str:
    """The generated part of the README, from the result files below `bench`."""
    parts = list(_parts(bench, SUMMARY))
    if (bench.parent / CHART).exists():
        parts.insert(0, f"![Costs of the gateway and other proxies]({CHART})\n")
    return "\n".join([BEGIN, *(parts or [NOT_MEASURED]), END])


def benchmarks(bench: Path) -> str:
    """docs/benchmarks.md"""
    return "\n".join([INTRODUCTION, *(list(_parts(bench, ALL)) or [NOT_MEASURED])])


def _parts(bench: Path, readers: tuple[tuple[str, Reader], ...]) -> Iterator[str]:
    for name, read in readers:
        found = bench / name
        for made in read(found.read_bytes()) if found.exists() else ():
            yield text(made)
