"""Fencing of a run folder: a file with the leader's epoch; a controller that finds a higher one does nothing.

A leader suspended between checking the file and acting would still act once. To keep it from starting a unit, the
process of a unit is started via `claim_command`: it creates a file that only one process can create, and a leader
that finds a unit without a process creates it instead (`claim_as_void`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from forebay.providers.protocol import ProviderError

CLAIM: Final = "claim"
"""In the folder of a unit: created by its process, or by a leader that gives the unit up."""
CLAIMING: Final = ("/bin/sh", "-c", 'set -C && echo $$ > "$0" && exec "$@"')
"""With -C an existing file is left alone, and nothing is executed. The process id stays the same."""


class Fenced(ProviderError):  # noqa: N818 - a state, not a mistake
    """Another controller has taken over the cluster."""


class Fence:
    """The fence as used by the leader of one epoch, which may act only once it has raised it."""

    def __init__(self, folder: Path, epoch: int) -> None:
        self._folder = folder
        self.epoch = epoch

    def raise_up(self) -> None:
        """Keep controllers of older epochs from acting. Raises `Fenced` if the fence is higher already, and
        OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / str(self.epoch)).touch()
        for older in _epochs(self._folder):
            if older < self.epoch:
                (self._folder / str(older)).unlink(missing_ok=True)
        self.check()

    def check(self) -> None:
        """Call this right before every action. Raises `Fenced`."""
        found = highest_epoch(self._folder)
        if found != self.epoch:
            raise Fenced(f"epoch {found} leads this cluster; this controller has epoch {self.epoch} and does nothing")


def highest_epoch(folder: Path) -> int:
    """The highest epoch of any leader so far; 0: none."""
    return max(_epochs(folder), default=0)


def _epochs(folder: Path) -> list[int]:
    try:
        return [int(path.name) for path in folder.iterdir() if path.name.isascii() and path.name.isdigit()]
    except FileNotFoundError:
        return []


def claim_command(folder: Path, command: Sequence[str]) -> list[str]:
    """The command that starts the unit of a folder, unless it has been claimed."""
    return [*CLAIMING, str(folder / CLAIM), *command]


def claim_as_void(folder: Path) -> bool:
    """Claim a unit without a process, so that it never gets one; False: it has or had one. Raises OSError."""
    try:
        (folder / CLAIM).open("x").close()
    except FileExistsError:
        return False
    return True
