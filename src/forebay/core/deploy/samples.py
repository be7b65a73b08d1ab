"""What gateways report to control about requests of a model that is being rolled out."""

from dataclasses import dataclass
from typing import Final

from forebay.core.rollout.values import Arm

PAIR_CHARS_MAX: Final = 8192
"""Most characters of each text of a pair; the rest is cut off."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request that was served by its intended arm at the first attempt. Times in seconds; negative: unknown."""

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
    """The answer is a refusal; None: unknown, or no text."""
    degenerate: bool | None = None
    """The answer is empty or repeats itself."""
    early: bool = False
    """It began before the split's `counts_from` (warm-up): guards count it, the comparison does not."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The answers of both revisions to one mirrored request."""

    rollout: str
    stratum: str
    prompt: str
    """The prompt as text."""
    stable: str
    canary: str
    schema: str = ""
    """The requested JSON schema, as JSON; empty: none, `{}`: any JSON."""
    alike: float | None = None
    """Similarity of embeddings, 0..1, whose vectors stay in the gateway. None: both answers are texts."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A gateway's response to `GET /observations?after=N` on its private port: what came after number N."""

    instance: str
    """Differs between starts of a gateway; numbering restarts with it."""
    last: int = 0
    """Number of the last sample, for the next request."""
    samples: tuple[Sample, ...] = ()
    pairs: tuple[Pair, ...] = ()
    missed: int = 0
    """Samples after N that were dropped because they were not fetched in time."""
