"""Values of the repository: what is found on disk, and what is known of a model before and after it is loaded."""

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from forebay.core.serving.config import ModelConfig
from forebay.core.serving.errors import Kind, Refused

CONFIG_FILE: Final = "config.pbtxt"
CONFIGS_FOLDER: Final = "configs"
ALLOW_PICKLE: Final = "forebay.allow_pickle"
"""Parameter that tells a backend that the operator allows unpickling for this model. Never read from a file."""
COMPLETE: Final = "forebay.complete"
"""Parameter that tells the Python backend not to call `auto_complete_config`: the operator has disabled it."""


class BadModel(Refused):
    """A model cannot be served; `problems` lists all reasons, each with its field or line."""

    def __init__(self, name: str, problems: Iterable[str]) -> None:
        # names on disk and in requests may contain characters that no response can carry
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
    """Operator settings for all models."""

    gpus: tuple[int, ...] = ()
    """GPUs that instances may run on."""
    gpu_backends: frozenset[str] = frozenset({"onnxruntime", "pytorch", "python"})
    """Backends that can use them."""
    max_batch_default: int = 4
    """`max_batch_size` of models that can batch and do not set it; Triton's `default-max-batch-size`."""
    max_batch_of: Mapping[str, int] = field(default_factory=dict)
    """The same for single backends."""
    auto_complete: bool = True
    """False: a model needs a complete configuration."""
    allow_pickle: frozenset[str] = frozenset()
    """Names of models whose files may be unpickled, which executes arbitrary code in them."""
    config_name: str = ""
    """`configs/<name>.pbtxt` takes precedence over `config.pbtxt`; Triton's `--model-config-name`."""


@dataclass(frozen=True, slots=True)
class Found:
    """A model found in a repository. With `problems` it cannot be read, but other models can."""

    name: str
    folder: Path
    """Folder of the model; of a bare model file, the folder that contains it."""
    versions: Mapping[int, Path] = field(default_factory=dict)
    """Folder of each version."""
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    bare: str = ""
    """Name of a bare model file, which has no configuration or folder of its own."""
    stamp: str = ""
    """Changes whenever a file of the model does."""
    roots: tuple[Path, ...] = ()
    """Folders that links may lead to."""


@dataclass(frozen=True, slots=True)
class Described:
    """A model with a validated configuration, ready to be loaded."""

    config: ModelConfig
    document: dict[str, Any]
    """The configuration as Triton shows it: JSON, field names as in config.pbtxt, defaults filled in."""
    folder: Path
    """Base folder of relative paths in the configuration (warm-up data, initial states)."""
    versions: Mapping[int, Path]
    """Folders of all versions, from which the version policy chooses."""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Output name → class labels."""
    warnings: tuple[str, ...] = ()
    """Fields without effect, for the operator."""
    temporary: "tempfile.TemporaryDirectory[str] | None" = None
    """Holds the files of a load request."""

    def release(self) -> None:
        """Remove the files of a load request; `versions` must no longer be in use. Idempotent."""
        if self.temporary is not None:
            self.temporary.cleanup()
