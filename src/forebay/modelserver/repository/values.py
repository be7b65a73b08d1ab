"""What is found in a repository and what is known of a model before and after it is loaded."""

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from forebay.core.serving.config import ModelConfig
from forebay.core.serving.errors import Kind, Refused

CONFIG_FILE: Final = "config.pbtxt"
ALLOW_PICKLE: Final = "forebay.allow_pickle"
"""The parameter by which a backend learns that the operator lets this model be unpickled. Never read from a file."""


class BadModel(Refused):
    """A model cannot be served as it is; `problems` has all of it, each with its field or line."""

    def __init__(self, name: str, problems: Iterable[str]) -> None:
        # Names on disk and in requests may be such that no answer could carry them.
        self.problems = tuple(problem.encode("utf-8", "backslashreplace").decode() for problem in problems)
        name = name.encode("utf-8", "backslashreplace").decode()
        if len(self.problems) == 1:
            text = f"model '{name}': {self.problems[0]}"
        else:
            listed = "; ".join(f"({number}) {problem}" for number, problem in enumerate(self.problems, 1))
            text = f"model '{name}' has {len(self.problems)} problems: {listed}"
        super().__init__(Kind.INVALID_ARGUMENT, text)


@dataclass(frozen=True, slots=True)
class Rules:
    """What the operator has decided for all models."""

    gpus: tuple[int, ...] = ()
    """That instances may run on."""
    gpu_backends: frozenset[str] = frozenset({"onnxruntime", "pytorch", "python"})
    """Backends that can compute on these."""
    max_batch_default: int = 4
    """Of models that can batch and do not say how much; Triton's `default-max-batch-size`."""
    auto_complete: bool = True
    """False: a model needs a whole configuration."""
    allow_pickle: frozenset[str] = frozenset()
    """Models by name whose files may be unpickled, which runs whatever code is in them."""
    config_name: str = ""
    """`configs/<name>.pbtxt` goes before `config.pbtxt` where it is there; Triton's `--model-config-name`."""


@dataclass(frozen=True, slots=True)
class Found:
    """A model as a repository has it. With `problems` it cannot be read, but others can."""

    name: str
    folder: Path
    """Of the model; of a bare model file, the folder that it lies in."""
    versions: Mapping[int, Path] = field(default_factory=dict)
    """The folders that have the files of each version."""
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    bare: str = ""
    """The name of a model file that has no configuration and no folders."""
    stamp: str = ""
    """Differs if any file of the model has changed."""


@dataclass(frozen=True, slots=True)
class Described:
    """A model that can be loaded."""

    config: ModelConfig
    document: dict[str, Any]
    """The configuration as Triton shows it: JSON, names as in config.pbtxt, defaults filled in."""
    folder: Path
    """Relative names in the configuration (warm-up data, initial states) are looked up below it."""
    versions: Mapping[int, Path]
    """All there are, with their folders; the configuration's version policy chooses from them."""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Output → names of its classes."""
    warnings: tuple[str, ...] = ()
    """What is accepted and has no effect here, for the operator."""
    temporary: "tempfile.TemporaryDirectory[str] | None" = None
    """Holds the files that came with a load request."""

    def release(self) -> None:
        """Remove what a load request left on disk; nothing may use `versions` any more. May be called twice."""
        if self.temporary is not None:
            self.temporary.cleanup()
