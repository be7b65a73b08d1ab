"""Writes demo models into a model repository: configuration and code from this package, weights from other packages.

Existing files are kept, so an interrupted run is completed; `config.pbtxt` is written last, as a server that polls
the repository takes the folder for a model once that exists.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from forebay.registry.digests import file_digest
from forebay.registry.sources import Progress, SourceError, obtain, parse

CONFIG: Final = "config.pbtxt"
DRAFT: Final = ".part"
"""Suffix of files being written."""


@dataclass(frozen=True, slots=True)
class Part:
    """A file from a package: `source` names it, or a folder in which its path is `inside`."""

    source: str
    sha256: str
    inside: str = ""


@dataclass(frozen=True, slots=True)
class Made:
    """A generated file: `make` gets the target path and the source files."""

    make: Callable[[Path, Sequence[Path]], None]
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A demo model. Its text files are below `demo/repository/NAME` in this package."""

    name: str
    task: str
    """Empty: no task endpoint, only the inference protocol."""
    about: str
    files: Mapping[str, Part | Made] = field(default_factory=dict)
    """The other files, by path in the model's folder."""
    needs: tuple[str, ...] = ()
    """Modules that it imports at run time."""
    extra: str = ""
    """The extra that installs them."""
    uses: tuple[str, ...] = ()
    """Models that it needs: the steps of an ensemble."""

    @property
    def missing(self) -> list[str]:
        """Required modules that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]


def chosen(models: Mapping[str, DemoModel], names: Sequence[str]) -> list[DemoModel]:
    """The models with these names (none: all), and those that they use. Raises `KeyError` for an unknown name."""
    found: dict[str, DemoModel] = {}
    waiting = list(names or models)
    while waiting:
        model = models[waiting.pop(0)]
        if model.name not in found:
            found[model.name] = model
            waiting += model.uses
    return list(found.values())


def write(model: DemoModel, repository: Path, home: Path, progress: Progress) -> None:
    """Write a model's folder. Raises `SourceError`, `OSError`, or `ImportError` if generating a file needs a missing
    module."""
    folder = repository / model.name
    for name, origin in model.files.items():
        target = folder / name
        if target.exists():
            continue
        draft = target.with_name(target.name + DRAFT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(origin, Part):
            shutil.copyfile(_verified(origin, home, progress), draft)
        else:
            found = [_verified(part, home, progress) for part in origin.parts]
            progress(f"making {target.name}", 0, None)
            origin.make(draft, found)
        os.replace(draft, target)
    packed = resources.files("forebay.cli").joinpath("demo", "repository", model.name)
    for name, file in sorted(_texts(packed, ""), key=lambda each: each[0] == CONFIG):
        target = folder / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())


def _verified(part: Part, home: Path, progress: Progress) -> Path:
    path = obtain(parse(part.source), home, progress)
    file = path / part.inside if part.inside else path
    if not file.is_file():
        raise SourceError(f"{file}: no such file; remove {path} and fetch it again")
    found = file_digest(file, home / "cache", progress)
    if found != part.sha256:
        raise SourceError(
            f"{file}: SHA-256 is {found}, but {part.sha256} was expected; remove {path} and fetch it again"
        )
    return file


def _texts(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for each in folder.iterdir():
        if each.is_file():
            yield prefix + each.name, each
        elif each.name != "__pycache__":
            yield from _texts(each, f"{prefix}{each.name}/")
