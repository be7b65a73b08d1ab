"""Context that all model versions share."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import structlog

from forebay.core.serving.config import ModelConfig
from forebay.core.serving.values import InferRequest, OnResponse
from forebay.modelserver.models.life.memory import MemoryManager
from forebay.modelserver.models.options import Options
from forebay.modelserver.models.running.caching import Cache
from forebay.modelserver.models.running.call import Call
from forebay.modelserver.models.running.rate_limiting import RateLimiter


class Source(NamedTuple):
    """What a process needs to load a version."""

    config: ModelConfig
    folder: Path
    """Folder of the version."""
    document: Mapping[str, Any]
    """The configuration document that clients see."""


class ModelAccess(Protocol):
    """Access of one model to the others."""

    def infer(self, request: InferRequest, on_response: OnResponse) -> Call:
        """Send a request to another model. Raises `Refused`."""

    async def load(self, name: str, parameters: Mapping[str, str | bytes | int | bool]) -> None:
        """Load or reload a model. Raises `Refused`."""

    async def unload(self, name: str, dependents: bool) -> None:
        """Unload a model. Raises `Refused`."""

    def lookup(self, name: str, version: int) -> ModelConfig | None:
        """The configuration of a ready version (-1: the latest), or None."""

    def source(self, name: str, version: int) -> Source:
        """What a process needs to load a ready version (-1: the latest) again. Raises `Refused`."""


@dataclass(slots=True)
class ServerContext:
    """Context of all model versions; the server creates it once."""

    options: Options
    log: structlog.stdlib.BoundLogger
    tasks: asyncio.TaskGroup
    """Owns the tasks that supervise the model processes."""
    models: ModelAccess
    memory: MemoryManager
    cache: Cache | None = None
    rate_limiter: RateLimiter | None = None
    loads: int = 0
    """Counter that gives each load a number of its own."""
    moves: int = 0
    """Number of state changes of all versions."""
    drained: bool = False
    """Whether running requests have had their time to finish: the server is stopping."""
