"""The memory that processes and their descendants actually use: their proportional set size (PSS).

Pages shared by several processes, such as weights in the page cache, count in equal parts for each of them.
"""

import os
from collections.abc import Iterable
from pathlib import Path


def used_bytes(pids: Iterable[int]) -> dict[int, int]:
    """By pid, the use of the process and its descendants. Processes that are gone or unreadable are left out."""
    children = _children()
    found = {}
    for pid in pids:
        sizes, todo = [], [pid]
        while todo:
            each = todo.pop()
            todo += children.get(each, ())
            size = _pss_bytes(each)
            if size is not None:
                sizes.append(size)
        if sizes:
            found[pid] = sum(sizes)
    return found


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path("/proc", name, "stat").read_bytes()
            except OSError:  # it has ended
                continue
            parent = int(stat[stat.rindex(b")") + 2 :].split()[1])
            found.setdefault(parent, []).append(int(name))
    return found


def _pss_bytes(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_bytes()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return None
