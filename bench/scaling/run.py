"""Policies of scaling beside each other, on fleets of modelled replicas, with the real decisions.

    python bench/scaling/run.py [--jobs 1] [--redo forebay] [--tables]
    python bench/scaling/run.py --look servegen-day [--seed 7] [--scale 1.25] [--start 300]

It begins with the targets of rivals, on draws of their own, and goes on with the grid and with made loads that each
show one thing. What was measured is kept in results.json as it goes: a run that was stopped goes on where it was, and
`--redo` measures policies anew. The tables of docs/scaling.md are made from that file (`--tables`: only that).
`--look` prints one cell and keeps nothing. All of it takes about half an hour of one core.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from agree import AGREE, agreement
from cells import SCALES, SEEDS, WORKS
from made import made, shown
from page import write
from trial import FIGURES, RULES, TRIED, Job, measured, tuned

HERE = Path(__file__).parent
NICE: Final = 10
POLICIES: Final = ("oracle", "static", "forebay", *RULES)
DO: Final = {"tuning": measured, "agree": agreement, "made": shown, "grid": measured}
"""Part of the results → what measures a job of it."""
Part = dict[str, dict[str, dict[str, list[float]]]]
"""Cell → policy → seed → figures."""


class Results:
    """The file: it is read at the beginning and written as a whole."""

    def __init__(self, path: Path, redo: set[str]) -> None:
        self._path = path
        self.document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.document["figures"] = list(FIGURES)
        for part in DO:
            for policies in self.document.setdefault(part, {}).values():
                for policy in redo & policies.keys():
                    del policies[policy]

    def measure(self, part: str, jobs: Iterable[Job], pool: ProcessPoolExecutor) -> Part:
        """Do the jobs that are not done yet, and keep what comes of them."""
        cells: Part = self.document[part]
        open_ = [job for job in jobs if str(job.seed) not in cells.get(job.cell, {}).get(job.policy, {})]
        for done, (job, figures) in enumerate(pool.map(DO[part], open_), 1):
            cells.setdefault(job.cell, {}).setdefault(job.policy, {})[str(job.seed)] = figures
            self.save()
            print(f"{part}: {done} of {len(open_)}: {job.cell}, {job.policy} {figures}", file=sys.stderr, flush=True)
        return cells

    def save(self) -> None:
        """One line for each policy of a cell."""
        self.document["machine"] = {"python": platform.python_version(), "cpus": os.cpu_count()}
        text = "\n".join(_lines(self.document))
        self._path.with_suffix(".new").write_text(text + "\n")
        self._path.with_suffix(".new").replace(self._path)


def _lines(value: Any, depth: int = 0, before: str = "", after: str = "") -> Iterator[str]:
    """JSON with objects opened to the policies, but not further."""
    if depth == 3 or not isinstance(value, dict) or not value:
        yield f"{' ' * depth}{before}{json.dumps(value)}{after}"
        return
    yield f"{' ' * depth}{before}{{"
    for at, (key, each) in enumerate(sorted(value.items())):
        yield from _lines(each, depth + 1, f"{json.dumps(key)}: ", "," if at < len(value) - 1 else "")
    yield f"{' ' * depth}}}{after}"


def grid(targets: dict[str, dict[str, float]], policies: Sequence[str]) -> Iterator[Job]:
    """What matters most comes first: the load as it is, then other step times, then slow starts."""
    for scale, start_s in [(1.0, 0.0), *[(scale, 0.0) for scale in SCALES if scale != 1.0], (1.0, 300.0)]:
        for seed in SEEDS:
            for work in reversed(WORKS):
                for policy in policies:
                    yield Job(work, scale, start_s, policy, seed, targets[work].get(policy, 0.0))


def tuning() -> Iterator[Job]:
    """Targets of rivals, on a draw that the grid does not have."""
    for work in reversed(WORKS):
        for policy in ("hpa", "kpa", "apa"):
            for share in TRIED:
                yield Job(work, 1.0, 0.0, policy, 100, tuned(work, share))


def best(cells: Part) -> dict[str, dict[str, float]]:
    """Workload → rival → the target with the fewest hours that keeps the promise, else that which keeps it best."""
    found: dict[str, dict[str, float]] = {}
    for work in WORKS:
        own: dict[str, list[tuple[bool, float, float]]] = {}
        for cell, policies in cells.items():
            if not cell.startswith(work):
                continue
            for policy, seeds in policies.items():
                for attainment, hours, *_ in seeds.values():
                    kept = attainment >= 0.99
                    own.setdefault(policy, []).append(
                        (kept, -hours if kept else attainment, float(cell.split("@")[1]))
                    )
        found[work] = {policy: max(tried)[2] for policy, tried in own.items()}
    return found


def look(options: argparse.Namespace, targets: dict[str, dict[str, float]]) -> None:
    """Print one cell."""
    print(f"{options.look}, seed {options.seed}, step times x{options.scale:g}")
    for policy in POLICIES:
        begun = time.process_time()
        target = targets.get(options.look, {}).get(policy, 0.0)
        _, row = measured(Job(options.look, options.scale, options.start, policy, options.seed, target))
        text = ", ".join(f"{name} {value:g}" for name, value in zip(FIGURES, row, strict=True))
        print(f"{policy:8s} {text}  ({time.process_time() - begun:.0f} s)", flush=True)


def main() -> None:
    """Measure what is missing, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--redo", default="", help="policies to be measured anew, such as forebay")
    parser.add_argument("--only", default=",".join(POLICIES), help="policies to be measured")
    parser.add_argument("--tables", action="store_true", help="only write the tables")
    parser.add_argument("--look", choices=tuple(WORKS), help="print one cell")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--start", type=float, default=0.0, help="seconds; 0: with the weights on a local disk")
    options = parser.parse_args()
    results = Results(HERE / "results.json", set(filter(None, options.redo.split(","))))
    if options.look:
        look(options, results.document.get("targets", {}))
        return
    only = options.only.split(",")
    if not options.tables:
        with ProcessPoolExecutor(options.jobs, get_context("forkserver"), os.nice, (NICE,)) as pool:
            targets = results.document["targets"] = best(results.measure("tuning", tuning(), pool))
            results.measure("agree", AGREE, pool)
            results.measure("made", made(targets, only), pool)
            results.measure("grid", grid(targets, only), pool)
    write(results.document)


if __name__ == "__main__":
    main()
