"""What a seed stands for: a cluster, its clients, and which kinds of faults there are. Every seed has other ones."""

from dataclasses import dataclass, fields
from random import Random
from typing import Final

from forebay.core.model import Policy
from forebay.sim.full.faults import FAULTS

CHAOS_S: Final = (8.0, 20.0)
"""How long faults happen, from and to."""
SHARE_OF_FAULTS: Final = 0.5
"""Chance of each kind to be among those of a seed."""


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
    return Profile(
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
