"""Keeps model files in memory by asking the kernel to load them into its page cache, from which it may drop them.

A replica that starts then reads them at memory speed. Applies to the machine that control runs on.
"""

import asyncio
import os
from pathlib import Path
from typing import Final

from forebay.control.plan import Plan
from forebay.core.model import WorkerSpec

SHARE_MAX: Final = 0.5
"""The share of the available memory that all of them together may take."""
MEMINFO: Final = Path("/proc/meminfo")


async def in_memory(plan: Plan) -> dict[str, str]:
    """Load the files of all models that are to be cached; the results as text, by model. Raises OSError."""
    wanted = {}
    for model in plan.models:
        first = next(iter(model.slots), model.spare)
        if model.cached and first is not None and isinstance(first.spec, WorkerSpec):
            wanted[model.routes.name] = Path(first.spec.artifact)
    return await asyncio.to_thread(read_ahead, wanted, available_bytes()) if wanted else {}


def read_ahead(wanted: dict[str, Path], available: int) -> dict[str, str]:
    """Load all files of each model, or none if there is no room; the results as text, by model. Raises OSError."""
    room, results = int(available * SHARE_MAX), {}
    for model, path in sorted(wanted.items()):
        files = files_of(path)
        size = sum(file.stat().st_size for file in files)
        if size > room:
            results[model] = f"its {_megabytes(size)} are not cached in memory: there is room for {_megabytes(room)}"
            continue
        room -= size
        for file in files:
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        results[model] = f"its {_megabytes(size)} are cached in memory"
    return results


def files_of(path: Path) -> list[Path]:
    """The file, or all files below the folder, sorted; empty if there is neither."""
    found = [path] if path.is_file() else path.rglob("*")
    return sorted(file for file in found if file.is_file())


def available_bytes(meminfo: Path = MEMINFO) -> int:
    """Memory available without swapping, from the kernel; 0 if unknown. Raises OSError."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
