"""State machine of a model version, as a table."""

from enum import StrEnum
from typing import Final

from forebay.core.serving.errors import Kind


class State(StrEnum):
    """State of a version, named as in the repository index."""

    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"


class Event(StrEnum):
    """Events in the life of a version."""

    LOAD = "load"
    LOADED = "loaded"
    FAILED = "failed"
    """It could not be loaded, or failed for good while running."""
    UNLOAD = "unload"
    GONE = "gone"
    """Its processes have ended."""


UNLOADED: Final = "unloaded"
"""Prefix of the reason of a version that was unloaded on request; it does not affect server readiness."""

MOVES: Final = {
    (State.UNAVAILABLE, Event.LOAD): State.LOADING,
    (State.LOADING, Event.LOADED): State.READY,
    (State.LOADING, Event.FAILED): State.UNAVAILABLE,
    (State.LOADING, Event.UNLOAD): State.UNLOADING,
    (State.READY, Event.FAILED): State.UNAVAILABLE,
    (State.READY, Event.UNLOAD): State.UNLOADING,
    (State.UNLOADING, Event.GONE): State.UNAVAILABLE,
    (State.UNLOADING, Event.FAILED): State.UNAVAILABLE,
    (State.UNAVAILABLE, Event.UNLOAD): State.UNLOADING,
}
"""All legal transitions; any other is a bug."""


def after(state: State, event: Event) -> State:
    """The next state. Raises KeyError for an illegal transition."""
    return MOVES[state, event]


KIND_TEXT: Final = {
    Kind.UNKNOWN: "Unknown",
    Kind.INTERNAL: "Internal",
    Kind.NOT_FOUND: "Not found",
    Kind.INVALID_ARGUMENT: "Invalid argument",
    Kind.UNAVAILABLE: "Unavailable",
    Kind.UNSUPPORTED: "Unsupported",
    Kind.ALREADY_EXISTS: "Already exists",
    Kind.CANCELLED: "Cancelled",
    Kind.DEADLINE_EXCEEDED: "Deadline exceeded",
}
"""Prefix of the reason of a version that is not served, as Triton writes it."""


def not_ready(name: str, version: str) -> str:
    """Triton's text for a version that exists but is not ready."""
    return f"'{name}' version {version} is not at ready state"
