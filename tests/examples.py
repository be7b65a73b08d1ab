"""How many examples a property tries: in `make check` about a sixth of what it does in `make test`."""

from typing import Final

from hypothesis import settings

USUAL: Final = 100
"""Examples of a property that does not say how many, in `make test`; slow ones of compiled modules do say so."""
FEWEST: Final = 8


def examples(count: int) -> int:
    """So many, or fewer, by the profile that pytest was started with."""
    return min(count, max(FEWEST, count * settings().max_examples // USUAL))
