"""Quantiles of positive values in constant space: counts in buckets whose ends differ by 10 %.

After Masson, Rim and Lee, "DDSketch" (2019). Values below a millionth or above a million count in the outermost
buckets.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Final

GROWTH: Final = math.log(1.1)
INDEX_MAX: Final = 145
"""1.1 ** 145 is about a million."""


def with_figures(sketch: Mapping[int, int], figures: Iterable[float]) -> dict[int, int]:
    """The sketch with more values, all above 0."""
    found = dict(sketch)
    for figure in figures:
        index = max(-INDEX_MAX, min(INDEX_MAX, math.ceil(math.log(figure) / GROWTH)))
        found[index] = found.get(index, 0) + 1
    return found


def quantile(sketch: Mapping[int, int], share: float, several_min: int) -> float | None:
    """The upper end of the quantile's bucket; None with fewer than `several_min` values."""
    several = sum(sketch.values())
    if several < several_min:
        return None
    ranges = sorted(sketch)
    up_to = list(accumulate(sketch[index] for index in ranges))
    return math.exp(GROWTH * ranges[bisect_left(up_to, min(share, 1.0) * several)])
