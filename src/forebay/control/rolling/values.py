"""Requests, results and interfaces of deployments."""

from dataclasses import dataclass
from typing import Protocol

from forebay.control.plan import Artifact
from forebay.core.deploy.course import Course
from forebay.core.deploy.rollout import Rollout, Wanted
from forebay.core.rollout import Effect, Verdict


class DeployRefused(Exception):  # noqa: N818 - an answer, not a mistake
    """A rollout request was rejected. `param` names what is wrong: `model`, `revision`, `plan`, `id`."""

    def __init__(self, text: str, param: str | None = None) -> None:
        super().__init__(text)
        self.text = text
        self.param = param


class RevisionSource(Protocol):
    """The source of revisions. Both methods raise `DeployRefused`."""

    def find(self, model: str, name: str) -> str:
        """The id of a deployable revision, by its id or an alias. Blocks."""

    async def prepare(self, model: str, revision: str) -> Artifact:
        """Fetch, verify and convert it, which may take long."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A request for a rollout. `unchecked`: even if the plan most likely cannot reach a verdict in its time."""

    model: str
    revision: str
    """Its id, or an alias."""
    course: Course
    why: str = ""
    unchecked: bool = False


@dataclass(frozen=True, slots=True)
class RolloutStanding:
    """The status of a rollout. Times are seconds since the epoch; None: unknown for the replicas."""

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
