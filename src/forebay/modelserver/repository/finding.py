"""Finds models in repositories: folders with numbered versions, and bare model files."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from forebay.modelserver.repository.defaults import SUFFIXES
from forebay.modelserver.repository.paths import is_within, name_problem, version_of, version_problem
from forebay.modelserver.repository.values import CONFIG_FILE, BadModel, Found

FILES_MAX: Final = 100_000
"""Files in the folder of one model."""
DEPTH_MAX: Final = 32
"""Nesting depth within the folder of one model."""
SHOWN_CHARS_MAX: Final = 40
LANGUAGE_MODELS: Final = {".gguf"}

_BARE = {*SUFFIXES, *LANGUAGE_MODELS}
_SKIPPED = {"__pycache__", "lost+found"}
"""The latter is in the root of every ext4 file system, which a mounted volume of models may be."""


def scan(*folders: Path, linked: Sequence[Path] = ()) -> list[Found]:
    """All models of these repositories, by name. A broken model does not hide the others. Links may lead to files
    and folders within the repository and below `linked`.

    Raises `FileNotFoundError` or `NotADirectoryError` for a repository that does not exist, and `BadModel` for one
    that is itself the folder of a model.
    """
    models: dict[str, Found] = {}
    targets = tuple(Path(os.path.realpath(target)) for target in linked)
    for folder in folders:
        for found in _repository(folder, targets):
            other = models.get(found.name)
            if other is not None:
                places = " and ".join(sorted(str(f.folder / f.bare) for f in (other, found)))
                found = Found(found.name, found.folder, problems=(f"it exists twice: {places}",))  # noqa: PLW2901
            models[found.name] = found
    return [models[name] for name in sorted(models)]


def named(name: str) -> Found:
    """A model that exists only in a load request: `read` gets its configuration and files. Raises `BadModel`."""
    if trouble := name_problem(name):
        raise BadModel(name[:SHOWN_CHARS_MAX], [trouble])
    return Found(name, Path(), problems=("it is not in the repository",))


def _repository(folder: Path, linked: Sequence[Path]) -> Iterator[Found]:
    root = folder.resolve(strict=True)
    roots = (root, *linked)
    entries = [
        entry
        for entry in sorted(os.scandir(root), key=lambda entry: entry.name)
        if not entry.name.startswith(".") and entry.name not in _SKIPPED
    ]
    if any(entry.name == CONFIG_FILE for entry in entries):
        raise BadModel(root.name, [f"{root} is the folder of a model; the repository is the folder above it"])
    files = [entry for entry in entries if Path(entry.name).suffix in _BARE and _is_file(entry)]
    # Next to model folders, files are taken for leftovers, as in Triton.
    bare = bool(files) and not any(_looks_like_model(entry) for entry in entries)
    for entry in files if bare else entries:
        path = Path(entry.path)
        name = path.stem if bare else entry.name
        shown = name.encode("utf-8", "backslashreplace").decode()
        try:
            if trouble := name_problem(name):
                yield Found(shown, path, problems=(trouble,))
            elif not is_within(path, *roots):
                yield Found(name, path, problems=(_link_text(path),))
            elif bare:
                yield _bare(path, root, [each.name for each in entries])
            elif path.is_dir():
                yield _model(path, roots)
        except OSError as error:
            yield Found(shown, path, problems=(f"{error.filename or path} cannot be read: {error.strerror}",))


def _is_file(entry: "os.DirEntry[str]") -> bool:
    """Whether it is a file, or a link that leads nowhere: its model is missing."""
    try:
        return entry.is_file() or not os.path.exists(entry)
    except OSError:  # links in a loop, or into a forbidden folder
        return True


def _looks_like_model(entry: "os.DirEntry[str]") -> bool:
    if not os.path.isdir(entry):  # nor a link in a loop
        return False
    try:
        return any(name == CONFIG_FILE or version_of(name) is not None for name in os.listdir(entry))
    except OSError:
        return True


def _link_text(path: Path) -> str:
    return f"{path} is a link out of the repository; `forebay serve --allow-links-to DIR` allows those to a folder"


def _model(folder: Path, roots: Sequence[Path]) -> Found:
    versions: dict[int, Path] = {}
    warnings = []
    for entry in sorted(folder.iterdir()):
        version = version_of(entry.name)
        if version is not None and entry.is_dir():
            versions[version] = entry
        elif (trouble := version_problem(entry.name)) and entry.is_dir():
            warnings.append(f"the folder {entry.name[:SHOWN_CHARS_MAX]} is not a version: {trouble}")
    stamp, outside = _looked_through(folder, roots)
    sorted_versions = dict(sorted(versions.items()))
    return Found(
        folder.name, folder, sorted_versions, tuple(outside), tuple(warnings), stamp=stamp, roots=tuple(roots)
    )


def _bare(file: Path, root: Path, names: Sequence[str]) -> Found:
    """A bare model file. Files beside it that are named after it have its weights: `m.bin`, `m.onnx.data`."""
    if file.suffix in LANGUAGE_MODELS:
        hint = f"{file.name} is a language model: serve it with `forebay up`"
        return Found(file.stem, root, problems=(hint,), bare=file.name)
    seen = hashlib.blake2b(digest_size=16)
    for name in names:
        part = root / name
        if name == file.name or (name.startswith(f"{file.stem}.") and part.suffix not in _BARE and part.is_file()):
            _note(seen, name, part.stat())
    return Found(file.stem, root, {1: root}, bare=file.name, stamp=seen.hexdigest())


def _looked_through(folder: Path, roots: Sequence[Path]) -> tuple[str, list[str]]:
    """A digest of names, sizes and times of all files, and the problems: links that lead outside, too many files."""
    seen = hashlib.blake2b(digest_size=16)
    problems: list[str] = []
    left = FILES_MAX
    waiting = [(folder, 0)]
    been = set()
    while waiting:
        at, depth = waiting.pop()
        status = at.stat()
        if (status.st_dev, status.st_ino) in been:
            continue
        been.add((status.st_dev, status.st_ino))
        for entry in sorted(os.scandir(at), key=lambda entry: entry.name):
            left -= 1
            if left < 0 or depth > DEPTH_MAX:
                limit = f"{FILES_MAX} files" if left < 0 else f"{DEPTH_MAX} folders deep"
                return "", [*problems, f"{folder} has more than {limit}"]
            if entry.name in _SKIPPED:
                continue
            path = Path(entry.path)
            if entry.is_symlink() and not is_within(path, *roots):
                problems.append(_link_text(path))
            elif entry.is_dir():
                waiting.append((path, depth + 1))
            elif entry.is_file():
                _note(seen, entry.path, entry.stat())
            else:
                problems.append(f"{path} is neither a file nor a folder")
    return seen.hexdigest(), problems


def _note(seen: "hashlib.blake2b", name: str, status: os.stat_result) -> None:
    seen.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
