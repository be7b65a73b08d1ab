"""A week of Azure's coding service, regenerated from its published rates and lengths (DynamoLLM, HPCA'25)."""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Final

from forebay.sim.load.columns import Columns
from forebay.sim.load.values import Workload

BIN_S: Final = 300.0
RATE_PER_S: Final = 2.0
"""Mean over the week: 1.2 million requests. The service itself had 27.8."""
CDF_STEPS: Final = 10_000
"""Resolution of the inverse distribution of lengths: a draw is one look-up."""


def week(folder: Path, outputs: Sequence[int], rng: Random, rate_per_s: float = RATE_PER_S) -> Workload:
    """Requests of seven days, with mean rate `rate_per_s`.

    Poisson within each five minutes of the published rate; prompt lengths drawn independently from the published
    distribution; output lengths from `outputs`, as their published figure is too coarse below the third quartile.
    """
    published = rates(folder)
    scale = rate_per_s * len(published) / sum(published)
    at_s = array("d")
    for number, rate in enumerate(published):
        at, end = number * BIN_S, (number + 1) * BIN_S
        while (at := at + rng.expovariate(rate * scale)) < end:
            at_s.append(at)
    count = len(at_s)
    return Workload(
        f"azure-week ({rate_per_s:g} requests/s)",
        Columns(at_s, array("i", rng.choices(lengths(folder), k=count)), array("i", rng.choices(outputs, k=count))),
    )


def rates(folder: Path) -> list[float]:
    """Rates per five minutes, in requests per minute."""
    return [rate for _, rate in _rows(folder / "rate_5min_code.csv")]


def lengths(folder: Path) -> "array[int]":
    """Prompt lengths, equally likely."""
    return _inverse(_rows(folder / "input_tokens_cdf_code.csv"))


def _rows(path: Path) -> list[tuple[float, float]]:
    """The first two numbers of each row below the header."""
    rows = [row.split(",") for row in path.read_text().splitlines()[1:]]
    return [(float(row[0]), float(row[1])) for row in rows]


def _inverse(points: Sequence[tuple[float, float]]) -> "array[int]":
    """Equally likely lengths from a distribution (percent, tokens), interpolated linearly."""
    percents = [percent for percent, _ in points]
    lengths = array("i")
    for step in range(CDF_STEPS):
        percent = (step + 0.5) * 100 / CDF_STEPS
        place = min(max(bisect_right(percents, percent), 1), len(points) - 1)
        (low, fewest), (high, most) = points[place - 1 : place + 1]
        part = min(max((percent - low) / (high - low), 0.0), 1.0)
        lengths.append(round(fewest + (most - fewest) * part))
    return lengths
