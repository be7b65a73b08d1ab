"""Tuning of memory: the garbage collector runs seldom, and freed memory is kept for the next requests.

A collection stops everything and finds next to nothing. Memory that goes back to the kernel comes again page by page,
each cleared: for a tensor of 100 KB that costs more than copying it.
"""

import gc
from typing import Final

THRESHOLDS: Final = (20_000, 20, 20)
"""Requests create no reference cycles; only connections and model loads do."""
KEPT_BYTES: Final = 4 << 20
"""Blocks up to this size are kept when freed: twice as many bytes in total, at the end of the heap."""


def tune_memory() -> None:
    """Call this once in a serving process, after its modules are imported."""
    bytes(KEPT_BYTES)  # glibc adjusts its limits to the largest block that was freed
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
