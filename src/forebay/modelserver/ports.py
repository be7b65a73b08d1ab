"""What the fronts may ask of the model server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from forebay.core.serving.config import ModelConfig
from forebay.core.serving.statistics import ModelStatistics
from forebay.core.serving.values import InferRequest, OnResponse, Ticket


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A model (version) of the repository. `state` is READY, UNAVAILABLE, LOADING or UNLOADING; or all are empty."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model version that is served."""

    config: ModelConfig
    document: Mapping[str, Any]
    """The configuration as Triton shows it: JSON, names as in config.pbtxt, defaults filled in."""
    version: str
    versions: Sequence[str]
    """All versions of the model that are served, ascending."""
    abreast: int = 1
    """Requests that it works on at once, batches aside."""


class Models(Protocol):
    """The models and what can be done with them. Everything raises `core.serving.errors.Refused`."""

    @property
    def ready(self) -> bool:
        """Whether the server and every model that should be served are ready."""

    def view(self, name: str, version: str) -> ModelView:
        """The version of a model that a request for `version` (empty: the latest) goes to."""

    def labels(self, name: str, version: str, output: str) -> Sequence[str]:
        """What the classes of an output are called; empty: they have no names."""

    def statistics(self, name: str, version: str) -> Sequence[ModelStatistics]:
        """Of that version; of all versions if `version` is empty; of all models if `name` is."""

    def index(self, ready_only: bool) -> Sequence[IndexEntry]:
        """What the repository holds."""

    async def load(self, name: str, parameters: Mapping[str, str | bytes | int | bool]) -> None:
        """Load or reload a model; `config` and `file:<version>/<name>` override what the repository has."""

    async def unload(self, name: str, dependents: bool, version: str = "") -> None:
        """Unload a model, or one version (ours); with `dependents` also the models that only its ensemble needed."""

    def infer(self, request: InferRequest, on_response: OnResponse) -> Ticket:
        """Check and queue a request. Answers come to `on_response`, never before this has returned."""

    def dropped(self, request: InferRequest) -> None:
        """Count a request that was never queued, as a newer one has taken its place."""
