"""What the machine has that instances may be placed by, as Linux tells it in `/sys`."""

from pathlib import Path
from typing import Final

SYS: Final = Path("/sys")


def node_cpus(node: int, sys: Path = SYS) -> tuple[int, ...]:
    """The CPUs of a memory node, ascending; none if there is no such node, or nobody knows."""
    cpus: set[int] = set()
    try:
        text = (sys / f"devices/system/node/node{node}/cpulist").read_text()
        for part in filter(None, text.strip().split(",")):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return ()
    return tuple(sorted(cpus))
