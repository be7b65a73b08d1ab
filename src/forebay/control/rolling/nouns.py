"""What people say about deployments, what they are told, and what deployments need of others."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from forebay.control.plan import Artifact
from forebay.core.deploy.course import Course
from forebay.core.deploy.rollout import Rollout, Wanted
from forebay.core.rollout import Effect, Verdict

T = TypeVar("T")


class DeployRefused(Exception):  # noqa: N818 - an answer, not a mistake
    """What was asked for cannot be done. `param` names what is wrong: `model`, `revision`, `course`, `id`."""

    def __init__(self, text: str, param: str | None = None) -> None:
        super().__init__(text)
        self.text = text
        self.param = param


class Run(Protocol):
    """Calls what blocks: in a thread, or at once where nothing blocks."""

    async def __call__(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises."""


class Shelf(Protocol):
    """Where revisions come from. Both raise `DeployRefused`."""

    def find(self, model: str, name: str) -> str:
        """The id of a revision that may be served, by its id or an alias. Blocks."""

    async def prepare(self, model: str, revision: str) -> Artifact:
        """Fetch, check and convert it, which may take long."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody wants. `unchecked`: also with a plan that most likely cannot decide in its time."""

    model: str
    revision: str
    """Its id, or an alias."""
    course: Course
    why: str = ""
    unchecked: bool = False


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rollout stands. Times are seconds since the epoch; what is not known of replicas is None."""

    rollout: Rollout
    created_at: float
    created_by: str
    verdict: Verdict | None
    effects: tuple[Effect, ...]
    stable_ready: int | None
    canary_ready: int | None
    wanted: Wanted
    seen: int
    """Samples that were counted."""
