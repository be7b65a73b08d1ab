"""What to do about an XID, the number that NVIDIA's driver gives an error of a GPU.

The classes follow the column `Immediate Action` of NVIDIA's XID catalogue for Ampere and newer
(docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html) and, for memory, "NVIDIA GPU Memory Error Management"
(docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt), by which 64 asks for an exchange. Where the catalogue asks people to
look (54, 74, 144 to 150) the GPU rests meanwhile. Numbers that are not in the table are told of, and change nothing.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Final, NamedTuple


class Remedy(IntEnum):
    """What has to be done, the mildest first."""

    IGNORE = 0
    """Nothing: it follows on another error, or the driver has mended it."""
    RESTART = 1
    """The process that it hit is lost; the GPU is as good as before."""
    DRAIN = 2
    """Nothing new goes to the GPU, what runs there moves away; after a time without errors it is tried again."""
    RESET = 3
    """The GPU does nothing right before it, or its machine, was reset."""
    REPLACE = 4
    """The hardware is broken: only a person may let it serve again."""


class Xid(NamedTuple):
    """A row of the table. `hardware`: it says something about the GPU, and not only about what ran there."""

    remedy: Remedy
    text: str
    hardware: bool = True


_FELL_OFF: Final = "has fallen off the bus"
TABLE: Final[Mapping[int, Xid]] = {
    8: Xid(Remedy.RESTART, "stopped processing", hardware=False),
    11: Xid(Remedy.RESTART, "corrupted push buffer stream", hardware=False),
    13: Xid(Remedy.RESTART, "graphics engine exception", hardware=False),
    25: Xid(Remedy.RESTART, "illegal push buffer stream", hardware=False),
    31: Xid(Remedy.RESTART, "memory page fault", hardware=False),
    32: Xid(Remedy.RESTART, "corrupted push buffer stream", hardware=False),
    41: Xid(Remedy.RESTART, "copy engine exception", hardware=False),
    43: Xid(Remedy.IGNORE, "stopped processing for a process that failed", hardware=False),
    45: Xid(Remedy.IGNORE, "cleaned up after another error", hardware=False),
    46: Xid(Remedy.RESET, "stopped processing"),
    48: Xid(Remedy.RESET, "double-bit ECC error"),
    54: Xid(Remedy.DRAIN, "auxiliary power is not connected"),
    62: Xid(Remedy.RESET, "its micro-controller has halted"),
    63: Xid(Remedy.IGNORE, "a row of memory was remapped"),
    64: Xid(Remedy.REPLACE, "a row of memory could not be remapped"),
    68: Xid(Remedy.RESTART, "video processor exception", hardware=False),
    69: Xid(Remedy.RESTART, "graphics engine class error", hardware=False),
    74: Xid(Remedy.DRAIN, "NVLink error"),
    79: Xid(Remedy.RESET, _FELL_OFF),
    92: Xid(Remedy.IGNORE, "many single-bit ECC errors"),
    94: Xid(Remedy.RESTART, "contained ECC error"),
    95: Xid(Remedy.RESET, "uncontained ECC error"),
    109: Xid(Remedy.RESET, "context switch timeout"),
    110: Xid(Remedy.RESET, "security fault"),
    119: Xid(Remedy.RESET, "its system processor does not answer"),
    120: Xid(Remedy.RESET, "its system processor has failed"),
    121: Xid(Remedy.IGNORE, "corrected error of the link to the CPU"),
    136: Xid(Remedy.RESET, "link training has failed"),
    137: Xid(Remedy.IGNORE, "NVLink privilege error of a process", hardware=False),
    140: Xid(Remedy.RESET, "unrecovered ECC error"),
    143: Xid(Remedy.RESET, "initialisation has failed"),
    158: Xid(Remedy.RESET, "fatal timeout"),
    **dict.fromkeys(range(144, 151), Xid(Remedy.DRAIN, "NVLink error")),
}
NONFATAL: Final = "nonfatal"
"""In the line of an NVLink error (144 to 150): the link goes on."""
RECOVERY_CHANGED: Final = 154
"""Says in words what the others ask for; in numbers, a reading of the GPU does."""
_ASKED: Final = (("reboot", Remedy.RESET), ("reset", Remedy.RESET), ("drain", Remedy.DRAIN))


def classify(number: int, text: str = "") -> Xid:
    """The row of an XID; `text` is the driver's own line, if it is known."""
    if number == RECOVERY_CHANGED:
        asked = text.lower().rpartition(" to ")[2]
        remedy = next((remedy for word, remedy in _ASKED if word in asked), Remedy.IGNORE)
        return Xid(remedy, "the driver has changed its mind on how it recovers")
    row = TABLE.get(number, Xid(Remedy.IGNORE, "of a kind that is not known here"))
    return row._replace(remedy=Remedy.IGNORE) if row.remedy is Remedy.DRAIN and NONFATAL in text.lower() else row
