"""Finds the model that a cluster's source refers to."""

from pathlib import Path
from typing import Final, NamedTuple

from forebay.modelserver.repository import BadModel, read, scan
from forebay.modelserver.repository.defaults import SUFFIXES
from forebay.modelserver.repository.paths import version_of
from forebay.modelserver.repository.values import CONFIG_FILE

AMBIGUOUS: Final = (".onnx", ".py")
"""Suffixes of files that usually are something else: an embedding model, a program."""


class Choice(NamedTuple):
    """A model and its repository."""

    repository: Path
    model: str


def is_repository(path: Path) -> bool:
    """Whether a source is a model repository, a model folder, or a file that only the model server can serve."""
    if path.is_dir():
        return _is_model(path) or any(_is_model(each) for each in path.iterdir() if each.is_dir())
    return path.suffix in SUFFIXES and path.suffix not in AMBIGUOUS


def only_model(source: Path) -> str:
    """The name of the only model in a source; empty if there are several, or none."""
    try:
        if not source.is_dir() or _is_model(source):
            return source.stem if source.is_file() else source.name
        found = scan(source)
    except (BadModel, OSError):
        return ""
    return found[0].name if len(found) == 1 else ""


def choose_model(source: Path, name: str, wanted: str = "") -> Choice:
    """The model `wanted`, else the one called `name`, else the only one; its configuration is validated.

    `source` is a repository, the folder of one model, or a bare model file. Raises `BadModel` or `OSError`.
    """
    if not source.is_dir() or _is_model(source):
        repository, only = source.parent, source.stem if source.is_file() else source.name
    else:
        repository, only = source, ""
    found = {each.name: each for each in scan(repository)}
    if only:
        if wanted and wanted != only:
            raise BadModel(only, [f"engine.model is {wanted!r}, but {source} is the model {only!r}"])
        model = only
    elif wanted or name in found or len(found) != 1:
        model = wanted or name
    else:
        (model,) = found
    if not found:
        text = f"{repository} holds no model: a repository has a folder for each, such as {model}/1/model.onnx"
        raise BadModel(model, [text])
    if model not in found:
        there = ", ".join(sorted(found)) or "none"
        raise BadModel(model, [f"it is not in {repository}; there is: {there}. Name one with `engine.model`"])
    read(found[model]).release()
    return Choice(repository, model)


def _is_model(folder: Path) -> bool:
    return any(each.name == CONFIG_FILE or version_of(each.name) is not None for each in folder.iterdir())
