"""How often the garbage collector comes: it stops everything, and finds next to nothing."""

import gc
from typing import Final

THRESHOLDS: Final = (20_000, 20, 20)
"""Requests leave no cycles behind: what there are come from connections and from models that come and go."""


def collect_seldom() -> None:
    """Call it once in a process that serves, when its modules are imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
