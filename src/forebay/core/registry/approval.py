"""Approval of revisions: who may take which step, and the state that follows from the steps.

The state is never stored. It is derived from the steps and the current rules, so that stricter rules also apply to
revisions approved under milder ones.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final

REASON_CHARS_MAX: Final = 2000


class Role(IntEnum):
    """Roles; each includes the permissions of those before it."""

    VIEWER = 0
    OPERATOR = 1
    ADMIN = 2


class Step(StrEnum):
    """Steps in the approval of a revision."""

    ADD = "add"
    """It was registered."""
    APPROVE = "approve"
    REJECT = "reject"
    """It must not be served, even if it was approved before."""
    RESUBMIT = "resubmit"
    """Approvals start over."""


class ApprovalState(StrEnum):
    """The approval state of a revision."""

    PENDING = "pending"
    APPROVED = "approved"
    REJECTED = "rejected"


LEAST: Final = {
    Step.ADD: Role.OPERATOR,
    Step.APPROVE: Role.ADMIN,
    Step.REJECT: Role.ADMIN,
    Step.RESUBMIT: Role.OPERATOR,
}
"""The role that a step requires."""

MAY_FOLLOW: Final = {
    ApprovalState.PENDING: (Step.APPROVE, Step.REJECT),
    ApprovalState.APPROVED: (Step.REJECT,),
    ApprovalState.REJECTED: (Step.RESUBMIT,),
}
"""The steps allowed in each state; the first one is always `Step.ADD`."""


@dataclass(frozen=True, slots=True)
class ApprovalRules:
    """The cluster's requirements. `approvals_min` 0: every registered revision may be served."""

    approvals_min: int = 0
    """Number of different people who must approve."""
    self_approval: bool = False
    """Whether the approval of the person who registered it counts."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A step taken: by whom, when (seconds since the epoch), and why."""

    step: Step
    by: str
    at: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Standing:
    """The state that follows from the steps. `lacking`: number of missing approvals."""

    state: ApprovalState
    approved_by: tuple[str, ...] = ()
    lacking: int = 0
    why: str = ""


def standing(steps: Iterable[Taken], rules: ApprovalRules) -> Standing:
    """The state of a revision with these steps, in order, under these rules."""
    author, rejected, approvers = "", None, dict[str, None]()
    for taken in steps:
        match taken.step:
            case Step.ADD | Step.RESUBMIT:
                author = author or taken.by
                rejected, approvers = None, {}
            case Step.APPROVE:
                approvers[taken.by] = None
            case Step.REJECT:
                rejected = taken
    if rejected:
        why = f"rejected by {rejected.by}{': ' if rejected.reason else ''}{rejected.reason}"
        return Standing(ApprovalState.REJECTED, tuple(approvers), why=why)
    counted = tuple(name for name in approvers if rules.self_approval or name != author)
    lacking = max(rules.approvals_min - len(counted), 0)
    if lacking:
        others = "" if rules.self_approval or not author else f", by someone other than {author}"
        why = f"{_count(lacking)} of {rules.approvals_min} missing{others}"
        return Standing(ApprovalState.PENDING, counted, lacking, why)
    why = f"approved by {', '.join(counted)}" if counted else "no approval is required"
    return Standing(ApprovalState.APPROVED, counted, why=why)


def problem(steps: Iterable[Taken], new: Taken, role: Role, rules: ApprovalRules) -> str | None:
    """Why a person with that role may not take this step; None: they may."""
    steps = tuple(steps)
    if role < LEAST[new.step]:
        return f"to {new.step} needs the role {LEAST[new.step].name.lower()}, and {new.by} has {role.name.lower()}"
    if len(new.reason) > REASON_CHARS_MAX:
        return f"the reason has {len(new.reason)} characters, at most {REASON_CHARS_MAX} are allowed"
    if not steps:
        return None if new.step is Step.ADD else "it is not registered"
    now = standing(steps, rules)
    if new.step is Step.APPROVE and new.by in _approvers(steps):
        return f"{new.by} has already approved it"
    allowed = MAY_FOLLOW[now.state]
    if new.step not in allowed:
        return f"it is {now.state} ({now.why}); allowed steps: {', '.join(allowed)}"
    if new.step is Step.APPROVE and not rules.self_approval and new.by == steps[0].by:
        return f"{new.by} has registered it, and `registry.self_approval` is off: someone else must approve it"
    return None


def _approvers(steps: Iterable[Taken]) -> set[str]:
    found: set[str] = set()
    for taken in steps:
        if taken.step is Step.APPROVE:
            found.add(taken.by)
        else:
            found.clear()
    return found


def _count(approvals: int) -> str:
    return "1 approval" if approvals == 1 else f"{approvals} approvals"
