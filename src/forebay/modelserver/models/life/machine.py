"""CPU topology of the machine, read from Linux's `/sys`."""

from pathlib import Path
from typing import Final

SYS: Final = Path("/sys")
NODES: Final = "devices/system/node"


def has_node(node: int, sys: Path = SYS) -> bool:
    """Whether there is such a NUMA node, or none can be seen at all, as in some sandboxes."""
    return (sys / NODES / f"node{node}").exists() or not (sys / NODES).exists()


def node_cpus(node: int, sys: Path = SYS) -> tuple[int, ...]:
    """The CPUs of a NUMA node, ascending; empty if the node does not exist or cannot be read."""
    cpus: set[int] = set()
    try:
        text = (sys / NODES / f"node{node}/cpulist").read_text()
        for part in filter(None, text.strip().split(",")):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return ()
    return tuple(sorted(cpus))
