"""Faults of the rollout store and of preparing revisions."""

from collections.abc import Callable
from random import Random
from typing import Final, Protocol

from forebay.sim.full.rollouts.store import ShakyStore

Undo = Callable[[], None]


class Field(Protocol):
    """What these faults act on."""

    store: ShakyStore
    download_s: float
    """Download time of a revision."""
    download_breaks: str
    """Why the download fails; empty: it does not."""

    def set_trap(self, where: str) -> Undo:
        """Make control die after its next action of this kind; see `TRAPS`."""


Fault = Callable[[Field, Random], Undo | None]
TRAPS: Final = ("write", "publish", "place", "remove")
"""Right after a write to the store, publishing a snapshot, starting or stopping a unit."""


def _store_down(field: Field, rng: Random) -> Undo:
    field.store.down = True

    def undo() -> None:
        field.store.down = False

    return undo


def _conflict(field: Field, rng: Random) -> None:
    field.store.conflicts = rng.randint(1, 3)


def _answer_lost(field: Field, rng: Random) -> None:
    field.store.answers_lost = rng.randint(1, 2)


def _dies_after(field: Field, rng: Random) -> Undo:
    return field.set_trap(rng.choice(TRAPS))


def _slow_download(field: Field, rng: Random) -> Undo:
    field.download_s = rng.uniform(1.0, 12.0)

    def undo() -> None:
        field.download_s = 0.0

    return undo


def _failing_download(field: Field, rng: Random) -> Undo:
    field.download_breaks = "a chunk has another digest"

    def undo() -> None:
        field.download_breaks = ""

    return undo


FAULTS: Final[dict[str, Fault]] = {
    "store-down": _store_down,
    "store-conflict": _conflict,
    "store-answer-lost": _answer_lost,
    "control-dies-acting": _dies_after,
    "slow-download": _slow_download,
    "failing-download": _failing_download,
}
"""By name, in the order in which a seed draws them."""
