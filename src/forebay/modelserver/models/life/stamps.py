"""Digests that tell whether the files of a version have changed."""

import os
from collections.abc import Collection, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Final

from forebay.modelserver.repository import Described, Found
from forebay.modelserver.repository.values import CONFIG_FILE, CONFIGS_FOLDER

FILES_MAX: Final = 10_000
"""Files of one version that are looked at; the rest is ignored."""


def stamps(found: Found | None, described: Described) -> dict[int, str]:
    """For each version, a digest of the names, sizes and modification times of its files.

    As in Triton, files of the model beside its versions and its configuration belong to every version.
    """
    if found is not None and found.bare:
        return dict.fromkeys(described.versions, found.stamp)
    apart = {CONFIG_FILE, CONFIGS_FOLDER, *(folder.name for folder in described.versions.values())}
    shared = _stamp(described.folder, apart) if described.versions else ""
    return {number: shared + _stamp(folder) for number, folder in described.versions.items()}


def _stamp(folder: Path, apart: Collection[str] = ()) -> str:
    """A digest of the files in a folder, without its entries `apart`."""
    seen = blake2b(os.fsencode(folder), digest_size=16)
    for _, line in zip(range(FILES_MAX), _lines(folder, apart), strict=False):
        seen.update(os.fsencode(line))
    return seen.hexdigest()


def _lines(folder: Path, apart: Collection[str]) -> Iterator[str]:
    for at, folders, files in os.walk(folder, followlinks=True):
        skipped = {"__pycache__", *(apart if at == str(folder) else ())}
        folders[:] = sorted(set(folders) - skipped)
        for name in sorted(set(files) - skipped):
            try:
                status = (Path(at) / name).stat()
            except OSError:  # it has disappeared: someone writes to the repository now
                yield f"{at}/{name} "
            else:
                yield f"{at}/{name} {status.st_size} {status.st_mtime_ns} "
