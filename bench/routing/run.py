"""Routing policies beside each other: replays on virtual time, with modelled engines and the real gateway.

    python bench/routing/run.py [--jobs 2] [--redo cpr,oracle] [--tables]

It begins with the settings of rivals on draws of their own, goes on with the grid, and ends with the experiment of
Mooncake's figure 5. What was measured is kept in results.json as it goes: a run that was stopped goes on where it
was, and `--redo` measures policies anew. The tables of docs/routing.md are made from that file (`--tables`: only
that). All of it takes about half an hour of two cores.
"""

import argparse
import gc
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from grid import OURS, TUNED, Job, cluster, grid, requests, tuning
from page import write
from published import published

from forebay.sim.replay.outcome import Slo, summary
from forebay.sim.replay.run import replay
from forebay.sim.report.figures import FIGURES

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "routing.md"
FIGURES_KEPT: Final = (
    "goodput", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "cache_hit",
    "imbalance", "refused",
)  # fmt: skip
DIGITS: Final = 5
NICE: Final = 10
SAVE_EVERY: Final = 20
"""Replays."""
Part = dict[str, dict[str, dict[str, list[float]]]]
"""Cell → policy → seed → figures."""


def measured(job: Job) -> tuple[Job, list[float]]:
    """Do one replay."""
    described = cluster(job.change)
    outcome = replay(requests(job.load, job.seed, job.change.load), described, policy=job.policy, seed=job.seed)
    found = summary(outcome, Slo(described.slo.ttft_s, described.slo.tpot_s))
    gc.collect()  # what a replay leaves behind is large, and goes round in circles
    return job, [float(f"{FIGURES[name].of(found, described):.{DIGITS}g}") for name in FIGURES_KEPT]


class Results:
    """The file: it is read at the beginning and written as a whole."""

    def __init__(self, path: Path, redo: set[str]) -> None:
        self._path = path
        self.document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.document.setdefault("figures", list(FIGURES_KEPT))
        for part in ("tuning", "grid", "published"):
            for policies in self.document.setdefault(part, {}).values():
                for policy in redo & policies.keys():
                    del policies[policy]

    def measure(self, part: str, jobs: Iterable[Job], pool: ProcessPoolExecutor) -> Part:
        """Do the jobs that are not done yet, and keep what comes of them; what is not asked any more goes."""
        jobs, cells = list(jobs), self.document[part]
        asked = {(job.cell, job.policy) for job in jobs}
        for cell, policies in cells.items():
            for policy in [each for each in policies if (cell, each) not in asked]:
                del policies[policy]
        open_ = [job for job in jobs if str(job.seed) not in cells.get(job.cell, {}).get(job.policy, {})]
        for done, (job, figures) in enumerate(pool.map(measured, open_), 1):
            cells.setdefault(job.cell, {}).setdefault(job.policy, {})[str(job.seed)] = figures
            if done % SAVE_EVERY == 0 or done == len(open_):
                self.save()
                print(f"{part}: {done} of {len(open_)} replays", file=sys.stderr, flush=True)
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


def best_settings(cells: Part) -> dict[str, dict[str, str]]:
    """Kind of load → rival → its setting with the most goodput on the mean of all loads of the kind."""
    best: dict[str, dict[str, str]] = {}
    for kind in sorted({cell.rsplit(" ", 1)[0] for cell in cells}):
        own = [policies for cell, policies in cells.items() if cell.startswith(f"{kind} ")]
        best[kind] = {}
        for rival, variants in TUNED.items():
            means = {
                policy: fmean([figures[0] for policies in own for figures in policies[policy].values()])
                for policy in (rival, *(f"{rival}.{variant}" for variant in variants))
            }
            best[kind][rival] = max(means, key=lambda policy: means[policy])
    return best


def main() -> None:
    """Measure what is missing, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--redo", default="", help=f"policies to be measured anew, such as {OURS}")
    parser.add_argument("--tables", action="store_true", help="only write the tables")
    options = parser.parse_args()
    results = Results(HERE / "results.json", set(filter(None, options.redo.split(","))))
    if not options.tables:
        context = get_context("forkserver")
        with ProcessPoolExecutor(options.jobs, context, os.nice, (NICE,)) as pool:
            cells = results.measure("tuning", tuning(), pool)
            best = results.document["best"] = best_settings(cells)
            results.measure("grid", grid(best), pool)
            results.measure("published", published(), pool)
    write(PAGE, results.document)


if __name__ == "__main__":
    main()
