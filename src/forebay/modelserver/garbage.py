"""Tuning of the garbage collector: a collection stops everything and finds next to nothing."""

import gc
from typing import Final

THRESHOLDS: Final = (20_000, 20, 20)
"""Requests create no reference cycles; only connections and model loads do."""


def collect_seldom() -> None:
    """Call this once in a serving process, after its modules are imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
