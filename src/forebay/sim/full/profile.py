"""The profile of a seed: a cluster, its clients, and the kinds of faults."""

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
"""Range of the duration of faults."""
CHAOS_WITH_ROLLOUTS_S: Final = (20.0, 45.0)
SHARE_OF_FAULTS: Final = 0.5
"""Probability of each kind of fault in a seed."""
CALM: Final = 0.5
"""Probability that a seed with rollouts, several controls or scaling only has faults of control and the store, and
little load."""
HARMLESS: Final = frozenset(
    {"replica-dies", "start-refused", "nobody-knows", "control-dies", "bad-snapshot", "wall-steps"}
    | {*OF_ROLLOUTS, *OF_LEADERS}
)
"""Faults that clients must not notice if there is more than one replica."""
NOT_WITH_ROLLOUTS: Final = frozenset({"upgrade"})
"""Not combined with rollouts."""
SHARE_OF_LEADERS: Final = 0.3
"""Probability that a seed without rollouts has several controls."""
SHARE_OF_SCALING: Final = 0.3
"""Probability that its number of replicas changes."""
CHAOS_WITH_LEADERS_S: Final = (15.0, 30.0)
MORE_MAX: Final = 2
"""Most replicas beyond the initial number."""
LOAD_WHERE_CALM: Final = 0.4
"""Upper bound of the load as a share of capacity, in calm seeds."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Everything that a seed draws before the start."""

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
    """Share of streamed requests."""
    leaving: float
    slow: float
    batch: float
    chop: bool
    """Whether messages are split into random pieces."""
    chaos_s: float
    fault_every_s: float
    faults: tuple[str, ...]
    rollouts: tuple[str, ...] = ()
    """Kind and nature of each; see `rollouts.drawing`."""
    calm: bool = False
    """No request may fail."""
    controls: int = 1
    scaling: str = ""
    """The scaling policy; empty: the number of replicas is constant."""

    @property
    def stores(self) -> bool:
        """Whether control has a store; rollouts have a separate one."""
        return self.controls > 1 or bool(self.scaling)

    @property
    def replicas_max(self) -> int:
        """Most replicas."""
        return self.replicas + (MORE_MAX if self.scaling else 0)

    def __str__(self) -> str:
        return " ".join(f"{field.name}={_shown(getattr(self, field.name))}" for field in fields(self))


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def draw(rng: Random, *, faults: bool = True) -> Profile:
    """The profile of a seed; without faults, a baseline."""
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
    """Restrict to faults that clients must not notice with at least `least` replicas."""
    return replace(
        profile,
        requests_per_s=min(profile.requests_per_s, capacity * LOAD_WHERE_CALM),
        queue_max=100,
        queue_timeout_s=20.0,
        fault_every_s=max(1.5, profile.fault_every_s),
        faults=tuple(x for x in profile.faults if x in HARMLESS and (least > 1 or x != "replica-dies")),
        calm=True,
    )
