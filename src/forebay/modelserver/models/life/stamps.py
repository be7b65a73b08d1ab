"""Digests that tell whether the files of a version have changed."""

import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Final

from forebay.modelserver.repository import Described, Found

FILES_MAX: Final = 10_000
"""Files of one version that are looked at; the rest is ignored."""


def stamps(found: Found | None, described: Described) -> dict[int, str]:
    """For each version, a digest of the names, sizes and modification times of its files."""
    if found is not None and found.bare:
        return dict.fromkeys(described.versions, found.stamp)
    return {number: _stamp(folder) for number, folder in described.versions.items()}


def _stamp(folder: Path) -> str:
    seen = blake2b(str(folder).encode(), digest_size=16)
    for _, line in zip(range(FILES_MAX), _lines(folder), strict=False):
        seen.update(line.encode())
    return seen.hexdigest()


def _lines(folder: Path) -> Iterator[str]:
    for at, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(each for each in folders if each != "__pycache__")
        for name in sorted(files):
            try:
                status = (Path(at) / name).stat()
            except OSError:  # it has disappeared: someone writes to the repository now
                yield f"{at}/{name} "
            else:
                yield f"{at}/{name} {status.st_size} {status.st_mtime_ns} "
