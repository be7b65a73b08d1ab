"""The resources of this machine available to this process: cores, memory, and NUMA nodes."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forebay.core.placement.settings import cpu_list

ROOT: Final = Path("/")
UNLIMITED_BYTES: Final = 2**60
"""Control group limits above this mean unlimited."""


@dataclass(frozen=True, slots=True)
class Machine:
    """`numa`: the cores in `cpus` by NUMA node; a node without any is empty."""

    cpus: tuple[int, ...]
    memory_bytes: int
    numa: tuple[tuple[int, ...], ...] = ()


def this_machine(root: Path = ROOT) -> Machine:
    """Read from the kernel, below `root`. Unknown values are left out: cores are always known."""
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    return Machine(cpus, _memory_bytes(root), _parts(root, set(cpus)))


def _memory_bytes(root: Path) -> int:
    """The memory of the machine, or its control group's limit."""
    total = 0
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    limits = [
        int(text)
        for path in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
        if (text := _read(root / path).strip()).isdigit() and 0 < int(text) < UNLIMITED_BYTES
    ]
    return min([total, *limits]) if total else min(limits, default=0)


def _parts(root: Path, cpus: set[int]) -> tuple[tuple[int, ...], ...]:
    found: dict[int, tuple[int, ...]] = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        number, text = folder.name.removeprefix("node"), _read(folder / "cpulist").strip()
        if number.isdigit() and text:
            found[int(number)] = tuple(cpu for cpu in cpu_list(text) if cpu in cpus)
    return tuple(found.get(number, ()) for number in range(max(found, default=-1) + 1))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
