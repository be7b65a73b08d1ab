"""Loads for fleets: two real ones at their original scale, and generated ones that each show one effect."""

import csv
import gzip
from array import array
from collections.abc import Sequence
from random import Random
from typing import Final

import numpy as np
import numpy.typing as npt

from forebay.sim.fleet.values import Load
from forebay.sim.load.columns import Columns, columns
from forebay.sim.load.named import DATA, workload
from forebay.sim.load.values import Workload
from forebay.sim.load.week import BIN_S, lengths, rates

TICK_S: Final = 5.0
WEEK_TICK_S: Final = 10.0
"""A coarser tick, as a week has many."""
WEEK_PER_S: Final = 27.8
"""Mean requests per second of the week: 16.8 million in total."""
DAY_THINNED: Final = 39.0
"""Each request of the packaged day represents this many: 5 instead of 196 a second."""
MIX: Final = 5_000
"""Requests in a mix for measuring replicas."""
Pairs = tuple[tuple[int, int], ...]
Ints = npt.NDArray[np.int64]


def week(seed: int, rate_per_s: float = WEEK_PER_S, tick_s: float = WEEK_TICK_S) -> Load:
    """The week of Azure's coding service: Poisson at the published rates, lengths from the published distribution."""
    rng = np.random.default_rng(seed)
    published = np.array(rates(DATA / "azure"))
    per_tick = np.repeat(published * (rate_per_s / published.mean() * tick_s), int(BIN_S / tick_s))
    arrivals = rng.poisson(per_tick)
    prompts, outputs = np.array(lengths(DATA / "azure")), np.array(_answers(Random(seed)))  # noqa: S311
    tokens: list[list[float]] = [[], []]
    for hour in np.split(arrivals, len(arrivals) * int(tick_s) // 3600):  # the whole week at once takes a gigabyte
        for column, among in zip(tokens, (prompts, outputs), strict=True):
            column.extend(_sums(rng.choice(among, size=int(hour.sum())), hour))
    return Load(f"azure-week ({rate_per_s:g} requests/s)", tick_s, arrivals.tolist(), *tokens)


def week_mix(seed: int = 0) -> Pairs:
    """Requests of the week, without their times."""
    rng = Random(seed)  # noqa: S311 - chance that can be repeated
    prompts, outputs = lengths(DATA / "azure"), _answers(rng)
    return tuple([(max(1, rng.choice(prompts)), max(1, rng.choice(outputs))) for _ in range(MIX)])


def day(seed: int, thinned: float = DAY_THINNED) -> Load:
    """ServeGen's day of a large model: each request of the thinned trace about `thinned` times, within its 5 s.

    The exact number is Poisson-distributed with mean `thinned`, drawn with the seed.
    """
    rng = np.random.default_rng(seed)
    rows = np.array(_rows("m-large_day_5s.csv.gz"))
    kept = np.maximum(rows[:, 0], 1)
    arrivals = rng.poisson(rows[:, 0] * thinned)
    prompts, outputs = (arrivals * rows[:, column] / kept for column in (1, 2))
    return Load(f"servegen-day (x{thinned:g})", TICK_S, arrivals.tolist(), prompts.tolist(), outputs.tolist())


def day_mix() -> Pairs:
    """Requests of that day, without their times."""
    return tuple([(max(1, prompt), max(1, output)) for prompt, output in _rows("m-large_day_lengths.csv.gz")])


def requests(load: Load, mix: Pairs, seed: int) -> Workload:
    """Individual requests for a replay: as many per tick, at random times in it, with lengths from a mix."""
    rng = Random(seed)  # noqa: S311
    at_s, prompts, outputs = array("d"), array("i"), array("i")
    for tick, arrivals in enumerate(load.arrivals):
        for at in sorted(rng.random() for _ in range(round(arrivals))):
            prompt, output = rng.choice(mix)
            at_s.append((tick + at) * load.tick_s)
            prompts.append(prompt)
            outputs.append(output)
    return Workload(load.name, Columns(at_s, prompts, outputs))


def ticks(workload: Workload, tick_s: float = TICK_S) -> Load:
    """Any workload as a load by ticks."""
    found = columns(workload.arrivals)
    at = (np.array(found.at_s) / tick_s).astype(int)
    arrivals, prompts, outputs = (
        np.bincount(at, weights=weights).tolist() for weights in (None, found.prompt_tokens, found.output_tokens)
    )
    return Load(workload.name, tick_s, arrivals, prompts, outputs)


def made(name: str, rates_per_s: Sequence[float], mix: Pairs, seed: int) -> Load:
    """Poisson arrivals with a rate per tick, lengths from a mix."""
    rng = np.random.default_rng(seed)
    arrivals = rng.poisson(np.array(rates_per_s) * TICK_S)
    drawn = np.array(mix)[rng.integers(len(mix), size=int(arrivals.sum()))]
    return Load(name, TICK_S, arrivals.tolist(), _sums(drawn[:, 0], arrivals), _sums(drawn[:, 1], arrivals))


def constant(per_s: float, hours: float, mix: Pairs, seed: int) -> Load:
    """A constant rate."""
    return made(f"constant ({per_s:g}/s)", [per_s] * int(hours * 3600 / TICK_S), mix, seed)


def step(low_per_s: float, times: float, mix: Pairs, seed: int, *, at_s: float, until_s: float) -> Load:
    """A rate that increases by a factor of `times` in one step."""
    before, after = int(at_s / TICK_S), int((until_s - at_s) / TICK_S)
    return made(f"step (x{times:g})", [low_per_s] * before + [low_per_s * times] * after, mix, seed)


def _rows(name: str) -> list[list[int]]:
    with gzip.open(DATA / "servegen" / name, "rt") as file:
        return [[int(cell) for cell in row] for row in list(csv.reader(file))[1:]]


def _answers(rng: Random) -> Sequence[int]:
    return columns(workload("azure", rng).arrivals).output_tokens


def _sums(tokens: Ints, arrivals: Ints) -> list[float]:
    """Sums per tick."""
    before = np.concatenate([[0], np.cumsum(tokens)])[np.cumsum(arrivals)]
    sums: list[float] = np.diff(before, prepend=0).astype(float).tolist()
    return sums
