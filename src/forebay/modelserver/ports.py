"""Interface between the fronts and the model server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from forebay.core.serving.config import ModelConfig
from forebay.core.serving.statistics import ModelStatistics
from forebay.core.serving.values import InferRequest, OnResponse, Ticket


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A model or model version in the index. `state` is READY, UNAVAILABLE, LOADING or UNLOADING, or empty."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model version that is served."""

    config: ModelConfig
    document: Mapping[str, Any]
    """The configuration as Triton shows it: JSON, field names as in config.pbtxt, defaults filled in."""
    version: str
    versions: Sequence[str]
    """All ready versions of the model, ascending."""
    abreast: int = 1
    """Requests that it runs concurrently, regardless of batching."""


class Models(Protocol):
    """The models and operations on them. Everything raises `core.serving.errors.Refused`."""

    @property
    def ready(self) -> bool:
        """Whether the server and every model that should be served are ready."""

    def view(self, name: str, version: str) -> ModelView:
        """The version of a model that serves requests for `version` (empty: the latest)."""

    def labels(self, name: str, version: str, output: str) -> Sequence[str]:
        """Class labels of an output; empty: no labels."""

    def statistics(self, name: str, version: str) -> Sequence[ModelStatistics]:
        """Statistics of one version, of all versions if `version` is empty, or of all models if `name` is empty."""

    def index(self, ready_only: bool) -> Sequence[IndexEntry]:
        """The repository index, as of the last `refresh`, load or poll."""

    async def refresh(self) -> None:
        """Scan the repositories for `index`, unless that was done just now: that takes long if they are large."""

    async def load(self, name: str, parameters: Mapping[str, str | bytes | int | bool]) -> None:
        """Load or reload a model; `config` and `file:<version>/<name>` override the repository's files."""

    async def unload(self, name: str, dependents: bool, version: str = "") -> None:
        """Unload a model, or one version (our extension); `dependents`: also models that only its ensemble needed."""

    def infer(self, request: InferRequest, on_response: OnResponse) -> Ticket:
        """Validate and queue a request. Responses come to `on_response`, never before this returns."""

    def dropped(self, request: InferRequest) -> None:
        """Count a request that was displaced by a newer one before it was queued."""
