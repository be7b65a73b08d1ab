"""The life cycle of a model version, as a table."""

from enum import StrEnum
from typing import Final

from forebay.core.serving.errors import Kind


class State(StrEnum):
    """What a version is, by the names that the repository index has."""

    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"


class Event(StrEnum):
    """What happens to a version."""

    LOAD = "load"
    LOADED = "loaded"
    FAILED = "failed"
    """It cannot be loaded, or not be kept running."""
    UNLOAD = "unload"
    GONE = "gone"
    """Its processes are no more."""


UNLOADED: Final = "unloaded"
"""How the reason of a version begins that was unloaded by request: none for the server not to be ready."""

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
"""All that may happen; anything else is a mistake of ours."""


def after(state: State, event: Event) -> State:
    """The next state. Raises KeyError for what cannot happen."""
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
}
"""How Triton begins the reason of a version that is not served."""
