"""What a simulation is fed with: requests at their times, without their words."""

from collections.abc import Sequence
from typing import NamedTuple


class Arrival(NamedTuple):
    """One request."""

    at_s: float
    """Since the workload began; never less than that of the one before."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Chained ids of the prompt's blocks, the first one first: the same id is the same tokens after the same start.

    The last one may stand for less than a whole block. Empty: nothing of the prompt is shared with any other.
    """
    tenant: str = ""
    band: str = ""
    """A priority by its name; empty: the default."""


class Workload(NamedTuple):
    """Requests in the order of their arrival."""

    name: str
    arrivals: Sequence[Arrival]
    block_tokens: int = 512
    """How many tokens of a prompt each id of its `blocks` stands for."""
