"""Rank tests of two arms: whether the canary's values are larger, whatever their distribution.

If the arms of a block are alike, all assignments of its values to arms are equally likely, and U, the number of pairs
in which the canary's value is the larger (Mann and Whitney, 1947), has the generating function of Gauss's binomial
coefficients: Σ q^U = Π (1 - q^(n-k+i)) / (1 - q^i), i = 1..k. So exp(λU) over its mean is an e-value, as in N. W.
Koning, "Post-hoc and anytime valid permutation and group invariance testing" (2023); blocks multiply. It is exact for
finite samples, also if the canary's values are stochastically not larger: U only falls. Ties count half, which only
lowers the mean. Values of different blocks are never compared: load that changes for both arms cancels.

What this cannot detect is an arm with slow spells of its own, of many blocks in a row. Against these there is
`stretch`: how many times more sums of blocks vary than independent ones would, by half the mean squared difference of
neighbouring sums (J. von Neumann, 1941; the variance of Haar wavelets), at the length of sums where it is largest.
Log evidence is divided by it, as for normal sums with such a variance. It is at least 1 and so preserves the
guarantee for independent values; for spells it is an approximation.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

from forebay.core.rollout.odds import Evidence, mixed
from forebay.core.rollout.values import Swing

TILTS: Final = (0.02, 0.04, 0.08, 0.16, 0.32)
"""Alternatives: by how much the probability that a canary's value is the larger differs from a half."""
SIGNED: Final = (*(-tilt for tilt in TILTS), *TILTS)
NOTHING: Final = (0.0,) * len(SIGNED)
BLOCKS_MIN: Final = 24
"""With fewer blocks slow spells cannot be detected."""
LEVELS: Final = 12
PAIRS_MIN: Final = 2


class Ranked(NamedTuple):
    """The result of one block."""

    gains: tuple[float, ...]
    """Log e-values, for each of SIGNED."""
    z: float
    """How much larger the canary's values are, in standard deviations of U."""


def ranked(canary: Sequence[float], stable: Sequence[float]) -> Ranked:
    """Compare a block's values, at least one of each arm."""
    ordered = sorted(stable)
    doubled = sum(bisect_left(ordered, figure) + bisect_right(ordered, figure) for figure in canary)
    pairs = len(canary) * len(stable)
    excess = (doubled - pairs) / 2
    several = len(canary) + len(stable)
    means = [_log_mean(12 * tilt / (several + 1), several, min(len(canary), len(stable)), pairs) for tilt in TILTS]
    strides = [12 * tilt / (several + 1) * excess for tilt in TILTS]
    gains = [-stride - mean for stride, mean in zip(strides, means, strict=True)]
    gains += [stride - mean for stride, mean in zip(strides, means, strict=True)]
    return Ranked(tuple(gains), excess / math.sqrt(pairs * (several + 1) / 12))


def larger(logs: Sequence[float]) -> Evidence:
    """Evidence against "the canary's values are not larger"."""
    return mixed(logs[len(TILTS) :])


def smaller(logs: Sequence[float]) -> Evidence:
    """Evidence against "the canary's values are not smaller"."""
    return mixed(logs[: len(TILTS)])


def with_swing(swings: tuple[Swing, ...], z: float | None) -> tuple[Swing, ...]:
    """The swings after one more block: at each level two sums make one of the next."""
    if z is None:
        return swings
    found = list(swings)
    for level in range(LEVELS):
        if level == len(found):
            found.append(Swing())
        swing = found[level]
        if swing.held is None:
            found[level] = swing._replace(held=z)
            break
        squares = swing.squares + (z - swing.held) ** 2 / 2 ** (level + 1)
        found[level] = Swing(None, swing.pairs + 1, squares)
        z += swing.held
    return tuple(found)


def stretch(swings: Sequence[Swing], usual: float = 1.0) -> float:
    """The divisor of log evidence, at least 1, if single blocks vary `usual` times as much as independent ones."""
    found = 1.0
    for swing in swings:
        if swing.pairs >= PAIRS_MIN:
            found = max(found, swing.squares / swing.pairs / usual)
    return found


def usual(swings: Sequence[Swing]) -> float:
    """How much neighbouring blocks vary, at least 1; for events, which weigh more the rarer they are."""
    first = swings[0] if swings else Swing()
    return max(1.0, first.squares / first.pairs) if first.pairs else 1.0


def _log_mean(stride: float, several: int, few: int, pairs: int) -> float:
    """Log mean of exp(stride · (U - its mean)) over all assignments of `several` values of which one arm has
    `few`."""
    total = -stride * pairs / 2
    for i in range(1, few + 1):
        rest = several - few + i
        total += math.log(math.expm1(stride * rest) / math.expm1(stride * i) * (i / rest))
    return total
