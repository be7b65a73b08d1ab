"""Who may take which approval step, and the resulting state of a revision."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.registry.approval import (
    LEAST,
    MAY_FOLLOW,
    REASON_CHARS_MAX,
    ApprovalRules,
    ApprovalState,
    Role,
    Step,
    Taken,
    problem,
    standing,
)

PENDING, APPROVED, REJECTED = ApprovalState.PENDING, ApprovalState.APPROVED, ApprovalState.REJECTED
TWO = ApprovalRules(approvals_min=2)


def steps(*taken: str) -> list[Taken]:
    """`ann add`, `bob approve` …"""
    return [Taken(Step(each.split()[1]), each.split()[0], float(n)) for n, each in enumerate(taken)]


@pytest.mark.parametrize(
    ("taken", "rules", "state", "lacking"),
    [
        (["ann add"], ApprovalRules(), APPROVED, 0),
        (["ann add"], ApprovalRules(1), PENDING, 1),
        (["ann add", "ann approve"], ApprovalRules(1), PENDING, 1),
        (["ann add", "ann approve"], ApprovalRules(1, self_approval=True), APPROVED, 0),
        (["ann add", "bob approve"], ApprovalRules(1), APPROVED, 0),
        (["ann add", "bob approve"], TWO, PENDING, 1),
        (["ann add", "bob approve", "bob approve"], TWO, PENDING, 1),
        (["ann add", "bob approve", "cid approve"], TWO, APPROVED, 0),
        (["ann add", "bob approve", "cid reject"], TWO, REJECTED, 0),
        (["ann add", "bob reject"], ApprovalRules(), REJECTED, 0),
        (["ann add", "bob approve", "cid approve", "bob reject"], TWO, REJECTED, 0),
        (["ann add", "bob approve", "cid reject", "bob resubmit"], TWO, PENDING, 2),
        (["ann add", "bob approve", "cid reject", "ann resubmit", "cid approve"], ApprovalRules(1), APPROVED, 0),
        (["ann add", "cid reject", "bob resubmit", "ann approve"], ApprovalRules(1), PENDING, 1),
    ],
)
def test_revision_state_follows_from_its_steps(
    taken: list[str], rules: ApprovalRules, state: ApprovalState, lacking: int
) -> None:
    found = standing(steps(*taken), rules)
    assert (found.state, found.lacking) == (state, lacking)
    assert found.why


@pytest.mark.parametrize(
    ("taken", "new", "role", "rules", "said"),
    [
        ([], "ann add", Role.OPERATOR, TWO, None),
        ([], "ann add", Role.VIEWER, TWO, "needs the role operator, and ann has viewer"),
        ([], "ann approve", Role.ADMIN, TWO, "not registered"),
        (["ann add"], "ann add", Role.ADMIN, TWO, "it is pending"),
        (["ann add"], "bob approve", Role.OPERATOR, TWO, "needs the role admin"),
        (["ann add"], "bob approve", Role.ADMIN, TWO, None),
        (["ann add"], "ann approve", Role.ADMIN, TWO, "someone else must approve it"),
        (["ann add"], "ann approve", Role.ADMIN, ApprovalRules(1, self_approval=True), None),
        (["ann add", "bob approve"], "bob approve", Role.ADMIN, TWO, "bob has already approved it"),
        (["ann add"], "bob approve", Role.ADMIN, ApprovalRules(), "it is approved"),
        (["ann add"], "bob reject", Role.ADMIN, ApprovalRules(), None),
        (
            ["ann add", "bob reject"],
            "bob approve",
            Role.ADMIN,
            TWO,
            "it is rejected (rejected by bob); allowed steps",
        ),
        (["ann add", "bob reject"], "ann resubmit", Role.OPERATOR, TWO, None),
        (["ann add"], "ann resubmit", Role.OPERATOR, TWO, "it is pending"),
    ],
)
def test_approval_step_is_allowed_or_refused_with_a_reason(
    taken: list[str], new: str, role: Role, rules: ApprovalRules, said: str | None
) -> None:
    found = problem(steps(*taken), steps(new)[0], role, rules)
    assert found is None if said is None else said in str(found)


def test_reason_length_is_limited() -> None:
    new = Taken(Step.REJECT, "bob", 1.0, "x" * (REASON_CHARS_MAX + 1))
    assert "2001 characters" in str(problem(steps("ann add"), new, Role.ADMIN, TWO))


def test_approval_documentation_lists_every_step_and_state() -> None:
    assert set(LEAST) == set(Step)
    assert set(MAY_FOLLOW) == set(ApprovalState)


PEOPLE = st.sampled_from(["ann", "bob", "cid", "dan"])


@given(
    asked=st.lists(st.tuples(st.sampled_from(Step), PEOPLE, st.sampled_from(Role)), max_size=12),
    rules=st.builds(ApprovalRules, st.integers(0, 3), st.booleans()),
)
def test_revision_with_too_few_approvals_is_never_served(
    asked: list[tuple[Step, str, Role]], rules: ApprovalRules
) -> None:
    taken: list[Taken] = []
    for step, by, role in asked:
        new = Taken(step, by, 1.0)
        if problem(taken, new, role, rules) is None:
            taken.append(new)
            assert role >= LEAST[step]
        found = standing(taken, rules)
        if taken and found.state is APPROVED:
            last = max(n for n, each in enumerate(taken) if each.step in (Step.ADD, Step.RESUBMIT))
            approvers = {each.by for each in taken[last:] if each.step is Step.APPROVE}
            if not rules.self_approval:
                approvers.discard(taken[0].by)
            assert len(approvers) >= rules.approvals_min
            assert taken[-1].step is not Step.REJECT


@given(taken=st.lists(st.tuples(st.sampled_from(Step), PEOPLE), max_size=8), least=st.integers(0, 3))
def test_stricter_approval_rules_never_allow_more(taken: list[tuple[Step, str]], least: int) -> None:
    made = [Taken(step, by, 1.0) for step, by in taken]
    strict = standing(made, ApprovalRules(least + 1))
    if strict.state is APPROVED:
        assert standing(made, ApprovalRules(least)).state is APPROVED
        assert standing(made, ApprovalRules(least + 1, self_approval=True)).state is APPROVED
