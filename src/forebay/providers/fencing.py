"""The fence of a run folder: a file for the epoch of whoever leads, and who finds a higher one does nothing any more.

A leader that was stopped between looking at it and acting would still act once. So that no unit is ever started by
it, a unit's process is started by way of `claiming`: it makes a file that only one can make, and a leader that finds
a unit without a process makes it in its place (`void`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from forebay.providers.protocol import ProviderError

CLAIM: Final = "claim"
"""In the folder of a unit: made by its process, or by a leader that gives the unit up."""
CLAIMING: Final = ("/bin/sh", "-c", 'set -C && echo $$ > "$0" && exec "$@"')
"""With -C a file that is there already is left alone, and nothing is executed. The process stays the same one."""


class Fenced(ProviderError):  # noqa: N818 - a state, not a mistake
    """Another control has taken the cluster over."""


class Fence:
    """The fence as the leader of one epoch sees it: one that has not raised it yet may do nothing."""

    def __init__(self, folder: Path, epoch: int) -> None:
        self._folder = folder
        self.epoch = epoch

    def raise_up(self) -> None:
        """From now on nobody of an older epoch may act. Raises `Fenced` if it is higher already, and OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / str(self.epoch)).touch()
        for older in _epochs(self._folder):
            if older < self.epoch:
                (self._folder / str(older)).unlink(missing_ok=True)
        self.check()

    def check(self) -> None:
        """To be called right before every act. Raises `Fenced`."""
        found = height(self._folder)
        if found != self.epoch:
            raise Fenced(f"epoch {found} leads this cluster; this control has epoch {self.epoch} and does nothing")


def height(folder: Path) -> int:
    """The highest epoch that has led; 0: none has."""
    return max(_epochs(folder), default=0)


def _epochs(folder: Path) -> list[int]:
    try:
        return [int(path.name) for path in folder.iterdir() if path.name.isascii() and path.name.isdigit()]
    except FileNotFoundError:
        return []


def claiming(folder: Path, command: Sequence[str]) -> list[str]:
    """The command that starts the unit of a folder, unless somebody else has claimed it."""
    return [*CLAIMING, str(folder / CLAIM), *command]


def void(folder: Path) -> bool:
    """Claim a unit that has no process, so that it never gets one; False: it has one, or has had. Raises OSError."""
    try:
        (folder / CLAIM).open("x").close()
    except FileExistsError:
        return False
    return True
