"""Verdicts of rollouts, tried on drawn requests: how often guarantees are broken, and how soon harm is found.

    python bench/rollout/run.py [--held 100] [--healthy 500] [--others 50] [--tables]

What was measured is kept in results.json as it goes: a run that was stopped goes on where it was, and one that asks
for more repetitions begins anew where there are fewer. The tables of docs/rollouts.md are made from that file
(`--tables`: only that). All of it takes about half an hour of one core.
"""

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from held import CASES, Case, broken
from page import write
from rollouts import FINER, HARMFUL, HEALTHY, POWER, RULES, one, tally

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "rollouts.md"
POWER_REPEATS = 20
AS_GOOD = "as good"


class Results:
    """The file: it is read at the beginning and written as a whole after every cell."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def cell(self, part: str, name: str, repeats: int, measure: Callable[[], Any]) -> None:
        """Measure it unless it is there, with as many repetitions or more."""
        cells = self.document.setdefault(part, {})
        if cells.get(name, {}).get("repeats", 0) >= repeats:
            return
        cells[name] = {"repeats": repeats, "found": measure()}
        self._path.write_text(json.dumps(self.document, indent=1, ensure_ascii=False) + "\n")
        print(part, name, cells[name]["found"], flush=True)


def held(case: Case, repeats: int) -> dict[str, int]:
    """In how many of the repetitions each guarantee was broken."""
    counts: dict[str, int] = {}
    for seed in range(repeats):
        for name, was in broken(case, seed).items():
            counts[name] = counts.get(name, 0) + was
    return counts


def rollouts(name: str, repeats: int) -> dict[str, Any]:
    """Tallies by judge."""
    rules = FINER if "tolerated" in name else RULES
    scenario = (HEALTHY | HARMFUL)[name]
    calls = [one(scenario, rules, seed, True) for seed in range(repeats)]
    return {judge: _plain(tally([call[judge] for call in calls], name in HARMFUL)) for judge in calls[0]}


def _plain(row: Any) -> dict[str, float | None]:
    return {key: None if value == math.inf else value for key, value in row._asdict().items()}


def main() -> None:
    """Measure what is not there yet, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held", type=int, default=100)
    parser.add_argument("--healthy", type=int, default=500)
    parser.add_argument("--others", type=int, default=50)
    parser.add_argument("--tables", action="store_true")
    arguments = parser.parse_args()
    results = Results(HERE / "results.json")
    if not arguments.tables:
        measure(results, arguments)
    write(PAGE, results.document)


def measure(results: Results, arguments: argparse.Namespace) -> None:
    """What is not there yet."""
    for case in CASES:
        results.cell("held", case.name, arguments.held, partial(held, case, arguments.held))
    for name in HARMFUL | HEALTHY:
        repeats = arguments.healthy if name == AS_GOOD else arguments.others
        results.cell("rollouts", name, repeats, partial(rollouts, name, repeats))
    for metric, rows in POWER.items():
        for effect, scenario in rows:
            results.cell("power", f"{metric} {effect}", POWER_REPEATS, partial(_power, scenario))


def _power(scenario: Any) -> dict[str, float | None]:
    calls = [one(scenario, FINER, seed, False)["forebay"] for seed in range(POWER_REPEATS)]
    return _plain(tally(calls, True))


if __name__ == "__main__":
    main()
