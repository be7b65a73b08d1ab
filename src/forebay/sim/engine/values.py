"""What an engine is asked, and what it tells."""

from enum import Enum, auto
from typing import NamedTuple


class Job(NamedTuple):
    """A request, as an engine sees it."""

    id: int
    prompt_tokens: int
    output_tokens: int
    """After so many it ends by itself; at least one."""
    blocks: tuple[int, ...] = ()
    """Chained ids of the whole blocks of the prompt, from the first one on; one that is not full is left alone."""


class Kind(Enum):
    """What becomes of a job."""

    FIRST = auto()
    """Its prompt is read, its first token is there."""
    TOKEN = auto()
    """Another token; told only by a replica that was asked to tell of each."""
    DONE = auto()
    """All its tokens are there."""


class EngineEvent(NamedTuple):
    """Something has become of a job."""

    at: float
    id: int
    kind: Kind
    tokens: int
    """Of the answer, that are there now."""
    cached_tokens: int
    """Of the prompt, that did not have to be read."""


class JobTooLarge(ValueError):  # noqa: N818 - states the condition
    """A job that would not fit into the KV cache if it had all of it."""
