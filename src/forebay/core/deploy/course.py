"""What is to happen in a rollout: how much traffic the new revision gets, for how long, and what ends it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from forebay.core.rollout.planning import Step


class Kind(StrEnum):
    """Four courses of one machine."""

    CANARY = "canary"
    """A growing share of the traffic, then all of it."""
    BLUE_GREEN = "blue-green"
    """As many replicas as the old revision has, then all of the traffic at once."""
    SHADOW = "shadow"
    """Copies of requests whose answers nobody gets."""
    AB = "ab"
    """A fixed share of the callers for a fixed time; it ends with what was found, and moves nothing."""


@dataclass(frozen=True, slots=True)
class Course:
    """The course of a rollout. Times in seconds; shares are of the model's requests, above 0 and below 1."""

    kind: Kind = Kind.CANARY
    steps: tuple[Step, ...] = (Step(0.05, 600.0), Step(0.2, 1800.0))
    """What is compared with the old revision, one after the other; all traffic follows on the last one."""
    start_timeout_s: float = 1800.0
    """Replicas of the new revision that are not ready by then will not be."""
    warm_up_s: float = 30.0
    """Figures from this long after a change of the share do not count: caches are cold, queues are moving."""
    settle_s: float = 600.0
    """The replicas of the old revision stay warm for so long after they lost all traffic."""
    hold: bool = True
    """Without a verdict in time: wait for somebody to decide. False: go back."""

    @property
    def takes_over(self) -> bool:
        """Whether the new revision serves everything in the end."""
        return self.kind in (Kind.CANARY, Kind.BLUE_GREEN)


COURSES: Final = {
    Kind.CANARY: Course(),
    Kind.BLUE_GREEN: Course(Kind.BLUE_GREEN, ()),
    Kind.SHADOW: Course(Kind.SHADOW, (Step(0.2, 3600.0),)),
    Kind.AB: Course(Kind.AB, (Step(0.5, 86_400.0),)),
}
"""What a kind means if nothing else is said."""


def problems(course: Course) -> Iterator[str]:
    """What cannot be in a course, one sentence each."""
    shares = [step.share for step in course.steps]
    if any(not 0 < share < 1 for share in shares):
        yield "steps: a share lies above 0 and below 1; all of the traffic follows on the last step by itself"
    if shares != sorted(shares):
        yield "steps: shares grow from step to step"
    if any(not 0 < step.time_s < math.inf for step in course.steps):
        yield "steps: every step has a time above 0"
    if course.kind is Kind.BLUE_GREEN and course.steps:
        yield "steps: blue-green has none: the traffic moves at once"
    if course.kind is Kind.CANARY and not course.steps:
        yield "steps: a canary has at least one"
    if course.kind in (Kind.SHADOW, Kind.AB) and len(course.steps) != 1:
        yield f"steps: {course.kind} has exactly one"
    for name in ("start_timeout_s", "warm_up_s", "settle_s"):
        if not 0 <= getattr(course, name) < math.inf:
            yield f"{name}: a time of 0 or more"
    if any(step.time_s <= course.warm_up_s for step in course.steps):
        yield "warm_up_s: shorter than every step, of which nothing would be left"


def replicas_for(share: float, replicas: int) -> int:
    """How many of as many replicas as the model has a share of its traffic needs; one at least."""
    return max(1, math.ceil(share * replicas - 1e-9))
