"""Validation of external names that become paths: nothing may escape the model's folder."""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Final

from forebay.modelserver.repository.form.pbtxt import is_text

NAME_CHARS_MAX: Final = 200
"""Of a model's name, which is part of folder names, URLs and metric labels."""
PATH_CHARS_MAX: Final = 1000

VERSION_MAX: Final = 2**63 - 1
"""Triton's maximum, and that of its protocol's fields."""

_VERSION = re.compile(r"0|[1-9][0-9]{0,18}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def name_problem(name: str) -> str:
    """Why `name` is not a valid model name, or empty."""
    if not name.strip():
        return "a model needs a name"
    if len(name) > NAME_CHARS_MAX:
        return f"the name has {len(name)} characters; at most {NAME_CHARS_MAX}"
    if "/" in name or "\\" in name or name in {".", ".."}:
        return f"{name!r} is not a name: it contains path components"
    if _CONTROL.search(name) or not is_text(name):
        return f"{name!a} is not a name: it contains characters that are not text"
    return ""


def path_problem(path: str) -> str:
    """Why `path` is not a valid file path within the model's folder, or empty."""
    if not path or len(path) > PATH_CHARS_MAX:
        return f"a path has 1 to {PATH_CHARS_MAX} characters"
    if _CONTROL.search(path) or not is_text(path):
        return f"{path!a} contains characters that are not text"
    if path.startswith("/") or "\\" in path or ".." in PurePosixPath(path).parts:
        return f"{path!r} leads out of the model's folder"
    return ""


def version_of(name: str) -> int | None:
    """The version number of a folder with this name: digits without leading zeros, up to `VERSION_MAX`; else None."""
    if not _VERSION.fullmatch(name):
        return None
    number = int(name)
    return number if number <= VERSION_MAX else None


def version_problem(name: str) -> str:
    """Why a folder with a numeric name is not a version, or empty."""
    if not name.isascii() or not name.isdigit() or version_of(name) is not None:
        return ""
    if name.startswith("0"):
        return "zeros before the number"
    return f"the number is larger than {VERSION_MAX}"


def is_within(path: Path, *roots: Path) -> bool:
    """Whether `path`, after following links, lies in one of the resolved folders. Raises `OSError` for a loop."""
    # `Path.resolve` raises another error for loops.
    target = Path(os.path.realpath(path, strict=True))
    return any(target.is_relative_to(root) for root in roots)
