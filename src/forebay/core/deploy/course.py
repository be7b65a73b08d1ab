"""The plan of a rollout: how much traffic the new revision gets, for how long, and what ends it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from forebay.core.rollout.planning import Step


class Kind(StrEnum):
    """The kinds of rollouts, all run by one state machine."""

    CANARY = "canary"
    """A growing share of the traffic, then all of it."""
    BLUE_GREEN = "blue-green"
    """As many replicas as the old revision has, then all of the traffic at once."""
    SHADOW = "shadow"
    """Copies of requests, whose answers are discarded."""
    AB = "ab"
    """A fixed share of the callers for a fixed time; it ends with a report and does not move traffic."""


@dataclass(frozen=True, slots=True)
class Course:
    """The plan of a rollout. Times in seconds; shares are of the model's requests, above 0 and below 1."""

    kind: Kind = Kind.CANARY
    steps: tuple[Step, ...] = (Step(0.05, 600.0), Step(0.2, 1800.0))
    """Shares at which it is compared with the old revision, in order; all traffic follows after the last one."""
    start_timeout_s: float = 1800.0
    """The rollout fails if the new revision's replicas are not ready by then."""
    warm_up_s: float = 30.0
    """Requests within this time after a change of the share are not evaluated: caches are cold, queues unsettled."""
    settle_s: float = 600.0
    """How long the old revision's replicas are kept after they lost all traffic."""
    hold: bool = True
    """Without a verdict in time, wait for an operator's decision. False: roll back."""

    @property
    def takes_over(self) -> bool:
        """Whether the new revision gets all traffic in the end."""
        return self.kind in (Kind.CANARY, Kind.BLUE_GREEN)


COURSES: Final = {
    Kind.CANARY: Course(),
    Kind.BLUE_GREEN: Course(Kind.BLUE_GREEN, ()),
    Kind.SHADOW: Course(Kind.SHADOW, (Step(0.2, 3600.0),)),
    Kind.AB: Course(Kind.AB, (Step(0.5, 86_400.0),)),
}
"""The default plan of each kind."""


def problems(course: Course) -> Iterator[str]:
    """What is invalid in a plan, as `FIELD: what is allowed`."""
    shares = [step.share for step in course.steps]
    if any(not 0 < share < 1 for share in shares):
        yield "steps: shares above 0 and below 1; all of the traffic follows automatically after the last step"
    if shares != sorted(shares):
        yield "steps: shares that grow from step to step"
    if any(not 0 < step.time_s < math.inf for step in course.steps):
        yield "steps: a time above 0 for every step"
    if course.kind is Kind.BLUE_GREEN and course.steps:
        yield "steps: none for blue-green, where the traffic moves at once"
    if course.kind is Kind.CANARY and not course.steps:
        yield "steps: at least one for a canary"
    if course.kind in (Kind.SHADOW, Kind.AB) and len(course.steps) != 1:
        yield f"steps: exactly one for {course.kind}"
    for name in ("start_timeout_s", "warm_up_s", "settle_s"):
        if not 0 <= getattr(course, name) < math.inf:
            yield f"{name}: a time of 0 or more"
    if any(step.time_s <= course.warm_up_s for step in course.steps):
        yield "warm_up_s: a time shorter than every step, which would otherwise have nothing to evaluate"


def replicas_for(share: float, replicas: int) -> int:
    """How many replicas a share of the model's traffic needs, if all of it needs `replicas`; at least one."""
    return max(1, math.ceil(share * replicas - 1e-9))
