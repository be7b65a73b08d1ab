"""What the protocol's fronts need beside the models: shared memory regions, and settings of tracing and logging."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from forebay.core.serving.values import Buffer


class MemoryKind(StrEnum):
    """Where a registered region is."""

    SYSTEM = "system"
    CUDA = "cuda"


class Region(NamedTuple):
    """A region as a client registers it. Sizes in bytes."""

    kind: MemoryKind
    name: str
    size: int
    offset: int = 0
    """Of the region within the object that `key` names; of system memory only."""
    key: str = ""
    """What shm_open knows the memory by; of system memory only."""
    device: int = 0
    handle: bytes = b""
    """A CUDA IPC handle."""


class Target(Protocol):
    """A part of a region that an output goes to. It may be used after the region is unregistered."""

    def put(self, output: str, data: Buffer) -> None:
        """Copy the bytes of an output there. Raises `Refused`, also if there is not enough room."""


class Memory(Protocol):
    """Regions as requests use them. Raises `Refused` where there is no such part of a region."""

    def read(self, name: str, offset: int, size: int) -> memoryview:
        """The bytes that are there now."""

    def target(self, name: str, offset: int, size: int) -> Target:
        """Where an output may go."""


class Regions(Memory, Protocol):
    """Regions as clients administer them. Everything raises `Refused`."""

    def register(self, region: Region) -> None:
        """Make a region known."""

    def unregister(self, kind: MemoryKind, name: str) -> None:
        """Forget a region, or all of that kind if `name` is empty. Unknown names are no error."""

    def status(self, kind: MemoryKind, name: str) -> Sequence[Region]:
        """That region, or all of that kind if `name` is empty."""


class Settings(Protocol):
    """Settings as the protocol's documents have them. Changes are JSON as it came; None stands for the default.

    Unknown or unfit changes raise `Refused`, and then nothing is changed.
    """

    def trace(self, model: str) -> Mapping[str, Any]:
        """How requests of a model are traced; of all models without settings of their own if `model` is empty."""

    def change_trace(self, model: str, changes: Mapping[str, Any]) -> None:
        """Change that."""

    def logging(self) -> Mapping[str, Any]:
        """What is logged."""

    def change_logging(self, changes: Mapping[str, Any]) -> None:
        """Change that."""
