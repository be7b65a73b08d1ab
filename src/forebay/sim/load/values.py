"""The input of a simulation: requests with times and lengths, without their texts."""

from collections.abc import Sequence
from typing import NamedTuple


class Arrival(NamedTuple):
    """One request."""

    at_s: float
    """Since the start of the workload; never decreases."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Chained ids of the prompt's blocks, in order: equal ids mean equal tokens after an equal prefix.

    The last block may be partial. Empty: nothing of the prompt is shared with any other.
    """
    tenant: str = ""
    band: str = ""
    """A priority by name; empty: the default."""


class Workload(NamedTuple):
    """Requests in the order of their arrival."""

    name: str
    arrivals: Sequence[Arrival]
    block_tokens: int = 512
    """Tokens per id of `blocks`."""
