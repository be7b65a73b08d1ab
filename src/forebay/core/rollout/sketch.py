"""Quantiles of positive figures in constant space: counts in ranges that each end a tenth higher than they begin.

After Masson, Rim and Lee, "DDSketch" (2019). What is below a millionth or above a million is counted at the end.
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
    """With more figures, all above 0."""
    found = dict(sketch)
    for figure in figures:
        index = max(-INDEX_MAX, min(INDEX_MAX, math.ceil(math.log(figure) / GROWTH)))
        found[index] = found.get(index, 0) + 1
    return found


def quantile(sketch: Mapping[int, int], share: float, several_min: int) -> float | None:
    """The end of the range that holds it; None of fewer than `several_min` figures."""
    several = sum(sketch.values())
    if several < several_min:
        return None
    ranges = sorted(sketch)
    up_to = list(accumulate(sketch[index] for index in ranges))
    return math.exp(GROWTH * ranges[bisect_left(up_to, min(share, 1.0) * several)])
