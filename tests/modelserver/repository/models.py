"""Models on disk for tests of repositories."""

from pathlib import Path

import pytest

from forebay.core.serving.errors import Kind
from forebay.modelserver.repository import BadModel, Described, Rules, read, scan


def model(folder: Path, config: str | None, *files: str, name: str = "m") -> Path:
    """A model with these files; empty ones, but for the configuration."""
    for file in files or ("1/model.py",):
        (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / file).write_bytes(b"")
    if config is not None:
        (folder / name / "config.pbtxt").write_text(config)
    return folder


def described(folder: Path, config: str | None, *files: str, rules: Rules | None = None) -> Described:
    [found] = scan(model(folder, config, *files))
    return read(found, rules=rules)


def problems(folder: Path, config: str, *files: str, rules: Rules | None = None) -> list[str]:
    with pytest.raises(BadModel) as raised:
        described(folder, config, *files, rules=rules)
    assert raised.value.kind is Kind.INVALID_ARGUMENT
    assert all(problem in raised.value.text for problem in raised.value.problems)
    return list(raised.value.problems)
