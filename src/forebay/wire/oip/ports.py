"""Interfaces the protocol's front ends need besides the models: shared memory regions, trace and log settings."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from forebay.core.serving.values import Buffer


class MemoryKind(StrEnum):
    """The kind of memory of a region."""

    SYSTEM = "system"
    CUDA = "cuda"


class Region(NamedTuple):
    """A region as registered by a client. Sizes are in bytes."""

    kind: MemoryKind
    name: str
    size: int
    offset: int = 0
    """Of the region within the object that `key` names; system memory only."""
    key: str = ""
    """The name for shm_open; system memory only."""
    device: int = 0
    handle: bytes = b""
    """A CUDA IPC handle."""


class Target(Protocol):
    """A part of a region that an output is written to. It stays usable after the region is unregistered."""

    def put(self, output: str, data: Buffer) -> None:
        """Copy the bytes of an output there. Raises `Refused`, also if it is too small."""


class Memory(Protocol):
    """Regions as requests use them. Raises `Refused` if a region has no such part."""

    def read(self, name: str, offset: int, size: int) -> memoryview:
        """The bytes that are there now."""

    def target(self, name: str, offset: int, size: int) -> Target:
        """A part that an output can be written to."""


class Regions(Memory, Protocol):
    """Regions as clients administer them. Every method raises `Refused`."""

    def register(self, region: Region) -> None:
        """Register a region."""

    def unregister(self, kind: MemoryKind, name: str) -> None:
        """Unregister a region, or all of that kind if `name` is empty. Unknown names are ignored."""

    def status(self, kind: MemoryKind, name: str) -> Sequence[Region]:
        """That region, or all of that kind if `name` is empty."""


class Settings(Protocol):
    """Settings as in the protocol's documents. Changes are decoded JSON; None resets to the default.

    Unknown or invalid changes raise `Refused`, and then nothing is changed.
    """

    def trace(self, model: str) -> Mapping[str, Any]:
        """The trace settings of a model; of all models without settings of their own if `model` is empty."""

    def change_trace(self, model: str, changes: Mapping[str, Any]) -> None:
        """Change the trace settings."""

    def logging(self) -> Mapping[str, Any]:
        """The log settings."""

    def change_logging(self, changes: Mapping[str, Any]) -> None:
        """Change the log settings."""
