"""The remedy for an XID, the error number of NVIDIA's driver.

The classes follow the column `Immediate Action` of NVIDIA's XID catalogue for Ampere and newer, as of October 2025
(docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html) and, for memory, "NVIDIA GPU Memory Error Management"
(docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt), by which 64 requires replacement. Where the catalogue asks for
manual investigation (54, 74) the GPU is drained meanwhile. XIDs that are not in the table are reported without
effect.
"""

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Final, NamedTuple


class Remedy(IntEnum):
    """The required remedies, mildest first."""

    IGNORE = 0
    """Nothing: it is a consequence of another error, or the driver has handled it."""
    RESTART = 1
    """The affected process is lost; the GPU is unaffected."""
    DRAIN = 2
    """Nothing is placed on the GPU, what runs there moves away; it is tried again after a time without errors."""
    RESET = 3
    """The GPU is unusable until it or its machine is reset."""
    REPLACE = 4
    """The hardware is defective: only an operator may return it to service."""


class Xid(NamedTuple):
    """A row of the table. `hardware`: it concerns the GPU, not only what ran there."""

    remedy: Remedy
    text: str
    hardware: bool = True


_COPY: Final = (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136))
_DECODER: Final = (68, 83, 84, 88, 89, 96, 97, 98)
_JPEG: Final = (82, *range(99, 106))
_OPTICAL_FLOW: Final = (86, 139)
NVLINK: Final = range(144, 151)
"""NVLink errors whose log line states the severity: by the catalogue's second table, nonfatal ones are ignored, and
nearly all others require a reset."""


def _lost(text: str, numbers: Iterable[int]) -> Mapping[int, Xid]:
    """Rows of errors that only affect what ran on the GPU."""
    return dict.fromkeys(numbers, Xid(Remedy.RESTART, text, hardware=False))


TABLE: Final[Mapping[int, Xid]] = {
    8: Xid(Remedy.RESTART, "stopped processing", hardware=False),
    11: Xid(Remedy.RESTART, "corrupted push buffer stream", hardware=False),
    13: Xid(Remedy.RESTART, "graphics engine exception", hardware=False),
    25: Xid(Remedy.RESTART, "illegal push buffer stream", hardware=False),
    31: Xid(Remedy.RESTART, "memory page fault", hardware=False),
    32: Xid(Remedy.RESTART, "corrupted push buffer stream", hardware=False),
    43: Xid(Remedy.IGNORE, "stopped processing for a process that failed", hardware=False),
    44: Xid(Remedy.IGNORE, "graphics engine fault during a context switch", hardware=False),
    45: Xid(Remedy.IGNORE, "cleaned up after another error", hardware=False),
    46: Xid(Remedy.RESET, "stopped processing"),
    48: Xid(Remedy.RESET, "double-bit ECC error"),
    54: Xid(Remedy.DRAIN, "auxiliary power is not connected"),
    60: Xid(Remedy.RESTART, "video processor exception", hardware=False),
    62: Xid(Remedy.RESET, "its micro-controller has halted"),
    63: Xid(Remedy.IGNORE, "a row of memory was remapped"),
    64: Xid(Remedy.REPLACE, "a row of memory could not be remapped"),
    69: Xid(Remedy.RESTART, "graphics engine class error", hardware=False),
    74: Xid(Remedy.DRAIN, "NVLink error"),
    79: Xid(Remedy.RESET, "has fallen off the bus"),
    80: Xid(Remedy.RESTART, "corrupted data was sent to it", hardware=False),
    92: Xid(Remedy.IGNORE, "many single-bit ECC errors"),
    93: Xid(Remedy.IGNORE, "its InfoROM exceeded its write limit"),
    94: Xid(Remedy.RESTART, "contained ECC error"),
    95: Xid(Remedy.RESET, "uncontained ECC error"),
    109: Xid(Remedy.RESET, "context switch timeout"),
    110: Xid(Remedy.RESET, "security fault"),
    119: Xid(Remedy.RESET, "its system processor does not answer"),
    120: Xid(Remedy.RESET, "its system processor has failed"),
    121: Xid(Remedy.IGNORE, "error of the link between chips (C2C)"),
    136: Xid(Remedy.RESET, "link training has failed"),
    137: Xid(Remedy.IGNORE, "NVLink privilege error of a process", hardware=False),
    140: Xid(Remedy.RESET, "unrecovered ECC error"),
    143: Xid(Remedy.RESET, "initialisation has failed"),
    151: Xid(Remedy.RESET, "key rotation has failed"),
    155: Xid(Remedy.RESET, "NVLink error found by software"),
    156: Xid(Remedy.RESET, "a part of it was retired"),
    157: Xid(Remedy.IGNORE, "a part of it could not be retired"),
    158: Xid(Remedy.RESET, "fatal timeout"),
    **_lost("copy engine exception", _COPY),
    **_lost("video decoder exception", _DECODER),
    **_lost("JPEG decoder exception", _JPEG),
    **_lost("optical flow exception", _OPTICAL_FLOW),
    **dict.fromkeys(NVLINK, Xid(Remedy.DRAIN, "NVLink error")),
}
FATAL: Final = "fatal"
NONFATAL: Final = "nonfatal"
RECOVERY_CHANGED: Final = 154
"""States the required action in words; readings of the GPU have it as a number."""
_ASKED: Final = (("reboot", Remedy.RESET), ("reset", Remedy.RESET), ("drain", Remedy.DRAIN))


def classify(number: int, text: str = "") -> Xid:
    """The row of an XID; `text` is the driver's log line, if known."""
    if number == RECOVERY_CHANGED:
        asked = text.lower().rpartition(" to ")[2]
        remedy = next((remedy for word, remedy in _ASKED if word in asked), Remedy.IGNORE)
        return Xid(remedy, "the driver changed its recovery action")
    row = TABLE.get(number, Xid(Remedy.IGNORE, "unknown XID"))
    said = text.lower() if number in NVLINK else ""
    if NONFATAL in said:
        return row._replace(remedy=Remedy.IGNORE)
    return row._replace(remedy=Remedy.RESET) if FATAL in said else row
