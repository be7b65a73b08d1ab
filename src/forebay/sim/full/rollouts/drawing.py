"""The rollouts of a seed: their kinds, and the faults of the new revisions."""

from random import Random
from typing import Final

from forebay.core.deploy.course import Course, Kind
from forebay.core.rollout.planning import Step
from forebay.sim.full.replica import SOUND, Nature

SHARE: Final = 1 / 3
"""Probability that a seed has rollouts."""
ROLLOUTS_MAX: Final = 3
NATURES: Final[dict[str, Nature]] = {
    "sound": SOUND,
    "slow": Nature(slow=1.5),
    "failing": Nature(fails=0.1),
    "dying": Nature(dies=0.2),
    "broken": Nature(breaks="a tensor is missing"),
    "stuck": Nature(load_s=3600.0),
}
"""By name. One in two is sound."""
START_S: Final = 8.0
"""Start timeout of replicas."""


def draw(rng: Random) -> tuple[str, ...]:
    """The rollouts of a seed, in order, as `kind/nature`; none in most seeds."""
    if rng.random() >= SHARE:
        return ()
    bad = [name for name in NATURES if name != "sound"]
    kinds = (Kind.CANARY, Kind.CANARY, *Kind)
    return tuple(
        f"{rng.choice(kinds)}/{'sound' if rng.random() < 0.5 else rng.choice(bad)}"
        for _ in range(rng.randint(1, ROLLOUTS_MAX))
    )


def parse(rollout: str) -> tuple[Kind, str]:
    """Kind and nature of `kind/nature`."""
    kind, _, nature = rollout.partition("/")
    return Kind(kind), nature


def draw_course(kind: Kind, rng: Random) -> Course:
    """A plan that takes seconds, not hours."""
    shares = sorted(rng.choice((0.05, 0.2, 0.34, 0.5, 0.75)) for _ in range(rng.randint(1, 3)))
    if kind is Kind.BLUE_GREEN:
        shares = []
    if kind in (Kind.SHADOW, Kind.AB):
        shares = shares[-1:]
    return Course(
        kind,
        tuple(Step(share, rng.uniform(2.0, 8.0)) for share in shares),
        start_timeout_s=START_S,
        warm_up_s=rng.choice((0.0, 0.5, 1.5)),
        settle_s=rng.choice((0.0, 4.0)),
        hold=rng.random() < 0.6,
    )
