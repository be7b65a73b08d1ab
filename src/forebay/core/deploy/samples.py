"""What gateways tell control of the requests of a model that is being rolled out."""

from dataclasses import dataclass
from typing import Final

from forebay.core.rollout.values import Arm

PAIR_CHARS_MAX: Final = 8192
"""Of each text of a pair; the rest is left out."""
OK: Final = "ok"


@dataclass(frozen=True, slots=True)
class Sample:
    """One request that went where it was meant to go, at its first attempt. Times in seconds; below 0: unknown."""

    rollout: str
    arm: Arm
    at: float
    """When it ended, since the epoch."""
    code: str
    """`ok`, or the error that it ended with."""
    stratum: str
    """See `core.rollout.stratum_of`."""
    ttft_s: float = -1.0
    tpot_s: float = -1.0
    latency_s: float = -1.0
    output_tokens: int = 0
    refused: bool | None = None
    """The answer says that the model will not do it; None: unknown, or no text."""
    degenerate: bool | None = None
    """The answer is empty, or goes round in circles."""
    early: bool = False
    """It began before the split's `counts_from`: it counts for guards, and is no evidence."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The answers of both revisions to one mirrored request."""

    rollout: str
    stratum: str
    prompt: str
    """What was asked, as text."""
    stable: str
    canary: str
    schema: str = ""
    """The JSON schema that the answer was to follow, as JSON; empty: none, `{}`: any JSON."""
    alike: float | None = None
    """Of embeddings, whose vectors stay in the gateway: how alike they are, 0..1. None: both answers are texts."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A gateway's answer to `GET /observations?after=N` on its private port: what came after number N."""

    instance: str
    """Differs from start to start of a gateway; numbers begin anew with it."""
    last: int = 0
    """Number of the last sample; to be asked for next time."""
    samples: tuple[Sample, ...] = ()
    pairs: tuple[Pair, ...] = ()
    missed: int = 0
    """Samples after N that were dropped, as nobody has asked for them in time."""
