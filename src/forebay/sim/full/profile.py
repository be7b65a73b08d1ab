"""What a seed stands for: a cluster, its clients, and which kinds of faults there are. Every seed has other ones."""

from dataclasses import dataclass, fields, replace
from random import Random
from typing import Final

from forebay.core.model import Policy
from forebay.core.scaling.settings import Policy as Scaling
from forebay.sim.full.faults import FAULTS
from forebay.sim.full.leading.faults import FAULTS as OF_LEADERS
from forebay.sim.full.rollouts import drawing
from forebay.sim.full.rollouts.faults import FAULTS as OF_ROLLOUTS

CHAOS_S: Final = (8.0, 20.0)
"""How long faults happen, from and to."""
CHAOS_WITH_ROLLOUTS_S: Final = (20.0, 45.0)
SHARE_OF_FAULTS: Final = 0.5
"""Chance of each kind to be among those of a seed."""
CALM: Final = 0.5
"""Chance that in a seed with rollouts, several controls or scaling nothing but control and the store has faults, and
nobody has to wait long."""
HARMLESS: Final = frozenset(
    {"replica-dies", "start-refused", "nobody-knows", "control-dies", "bad-snapshot", "wall-steps"}
    | {*OF_ROLLOUTS, *OF_LEADERS}
)
"""Faults that nobody who asks may notice, where there is more than one replica."""
NOT_WITH_ROLLOUTS: Final = frozenset({"upgrade"})
"""Nobody installs another version while a rollout is under way."""
SHARE_OF_LEADERS: Final = 0.3
"""Chance that a seed without rollouts has several controls."""
SHARE_OF_SCALING: Final = 0.3
"""And that the number of replicas of its model changes."""
CHAOS_WITH_LEADERS_S: Final = (15.0, 30.0)
MORE_MAX: Final = 2
"""So many replicas more than at the beginning there may be."""
LOAD_WHERE_CALM: Final = 0.4
"""Of what the replicas can do, at most."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Everything that a seed draws before the beginning."""

    policy: str
    gateways: int
    replicas: int
    concurrency: int
    step_ms: float
    prefill_tokens_per_s: float
    tokens_max: int
    requests_per_s: float
    queue_max: int
    queue_timeout_s: float
    streams: float
    """Share of the requests."""
    leaving: float
    slow: float
    batch: float
    chop: bool
    """Whether messages arrive in pieces of all sizes."""
    chaos_s: float
    fault_every_s: float
    faults: tuple[str, ...]
    rollouts: tuple[str, ...] = ()
    """Kind and nature of each; see `rollouts.drawing`."""
    calm: bool = False
    """No request may fail."""
    controls: int = 1
    scaling: str = ""
    """Who says how many replicas there are, besides people; empty: there are always as many."""

    @property
    def stores(self) -> bool:
        """Whether control has a store; that of rollouts is another one."""
        return self.controls > 1 or bool(self.scaling)

    @property
    def replicas_max(self) -> int:
        """The most there may be."""
        return self.replicas + (MORE_MAX if self.scaling else 0)

    def __str__(self) -> str:
        return " ".join(f"{field.name}={_shown(getattr(self, field.name))}" for field in fields(self))


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def draw(rng: Random, *, faults: bool = True) -> Profile:
    """The profile of a seed; without faults, one to compare with."""
    replicas, concurrency = rng.randint(1, 4), rng.randint(1, 5)
    step_ms, tokens_max = rng.choice((20.0, 40.0, 80.0)), rng.choice((4, 20, 60))
    capacity = replicas * concurrency / (step_ms / 1000 * (tokens_max / 2 + 1))
    kinds = tuple(name for name in FAULTS if rng.random() < SHARE_OF_FAULTS)
    profile = Profile(
        policy=rng.choice(list(Policy)).value,
        gateways=rng.randint(1, 3),
        replicas=replicas,
        concurrency=concurrency,
        step_ms=step_ms,
        prefill_tokens_per_s=rng.choice((1_000.0, 10_000.0)),
        tokens_max=tokens_max,
        requests_per_s=min(12.0, capacity * rng.uniform(0.2, 1.4)),
        queue_max=rng.choice((0, 2, 10, 100)),
        queue_timeout_s=rng.choice((1.0, 5.0, 20.0)),
        streams=rng.choice((0.0, 0.5, 0.9, 1.0)),
        leaving=rng.choice((0.0, 0.1)),
        slow=rng.choice((0.0, 0.1)),
        batch=rng.choice((0.0, 0.0, 0.3)),
        chop=rng.random() < 0.2,
        chaos_s=rng.uniform(*CHAOS_S),
        fault_every_s=rng.choice((0.5, 1.5, 4.0)),
        faults=kinds if faults else (),
    )
    planned = drawing.draw(rng)
    if not faults:
        return profile
    return _with_rollouts(profile, planned, capacity, rng) if planned else _with_more(profile, capacity, rng)


def _with_rollouts(profile: Profile, planned: tuple[str, ...], capacity: float, rng: Random) -> Profile:
    more = tuple(name for name in OF_ROLLOUTS if rng.random() < SHARE_OF_FAULTS)
    profile = replace(
        profile,
        chaos_s=rng.uniform(*CHAOS_WITH_ROLLOUTS_S),
        faults=(*(name for name in profile.faults if name not in NOT_WITH_ROLLOUTS), *more),
        rollouts=planned,
    )
    return _calm(profile, capacity, profile.replicas) if rng.random() < CALM else profile


def _with_more(profile: Profile, capacity: float, rng: Random) -> Profile:
    controls = rng.choice((2, 2, 3)) if rng.random() < SHARE_OF_LEADERS else 1
    scaling = rng.choice(list(Scaling)).value if rng.random() < SHARE_OF_SCALING else ""
    if controls == 1 and not scaling:
        return profile
    more = tuple(name for name in OF_LEADERS if rng.random() < SHARE_OF_FAULTS) if controls > 1 else ()
    if controls > 1 and not more:
        more = ("leader-stops",)
    profile = replace(
        profile,
        chaos_s=rng.uniform(*CHAOS_WITH_LEADERS_S),
        faults=(*profile.faults, *more),
        controls=controls,
        scaling=scaling,
    )
    least = 1 if scaling else profile.replicas
    return _calm(profile, capacity * least / profile.replicas, least) if rng.random() < CALM else profile


def _calm(profile: Profile, capacity: float, least: int) -> Profile:
    """With nothing but faults that nobody who asks may notice, as there are at least so many replicas."""
    return replace(
        profile,
        requests_per_s=min(profile.requests_per_s, capacity * LOAD_WHERE_CALM),
        queue_max=100,
        queue_timeout_s=20.0,
        fault_every_s=max(1.5, profile.fault_every_s),
        faults=tuple(x for x in profile.faults if x in HARMLESS and (least > 1 or x != "replica-dies")),
        calm=True,
    )
