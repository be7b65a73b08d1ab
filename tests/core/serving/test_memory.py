"""Which models stay in memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.memory import GIB, MemoryBudget, Standing

NAMES = "abcd"


def held(memory: MemoryBudget) -> dict[str, Standing]:
    return {each.name: each for each in memory.standing()}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["admit", "admit", "pin", "enter", "leave", "resize", "remove"]),
            st.sampled_from(NAMES),
            st.integers(0, 12),
        ),
        max_size=50,
    )
)
def test_busy_and_pinned_models_stay_nobody_goes_needlessly_and_the_budget_holds(
    operations: list[tuple[str, str, int]],
) -> None:
    memory = MemoryBudget(10)
    for operation, name, size in operations:
        before = held(memory)
        victims: tuple[str, ...] = ()
        if operation in {"admit", "pin"}:
            others = sum(each.size_bytes for other, each in before.items() if other != name)
            may_go = {
                other: each.size_bytes
                for other, each in before.items()
                if other != name and not each.busy and not each.pinned
            }
            possible = others + size - sum(may_go.values()) <= 10
            if not possible:
                with pytest.raises(Refused):
                    memory.admit(name, size, pinned=operation == "pin")
                assert held(memory) == before
                continue
            victims = memory.admit(name, size, pinned=operation == "pin")
            assert memory.used_bytes <= 10
            for victim in victims:
                assert memory.used_bytes + before[victim].size_bytes > 10, "it need not have gone"
        elif operation == "enter":
            memory.enter(name)
        elif operation == "leave" and name in before and before[name].busy:
            memory.leave(name)
        elif operation == "resize" and name in memory:
            victims = memory.resize(name, size)
            assert name in memory
        elif operation == "remove":
            memory.remove(name)
        assert not any(before[victim].busy or before[victim].pinned for victim in victims)
        assert not any(victim in memory for victim in victims)
        assert memory.used_bytes == sum(each.size_bytes for each in memory.standing())


def test_the_least_recently_used_gives_way_and_what_is_small_is_spared() -> None:
    memory = MemoryBudget(10)
    for name, size in (("a", 4), ("b", 4), ("c", 2)):
        memory.admit(name, size)
    memory.enter("a")
    memory.leave("a")
    memory.leave("unknown")
    assert memory.admit("d", 3) == ("b",)
    assert [each.name for each in memory.standing()] == ["c", "a", "d"]
    assert memory.admit("e", 4) == ("a",), "without c's 2 bytes it would still not fit, with a's 4 it does"


def test_a_model_that_turns_out_larger_displaces_others_as_far_as_that_helps() -> None:
    memory = MemoryBudget(10)
    for name in NAMES[:3]:
        memory.admit(name, 3, pinned=name == "b")
    assert memory.resize("c", 6) == ("a",)
    assert memory.resize("c", 12) == ()
    assert memory.used_bytes == 15, "more than the budget: nobody is left who may go"


def test_a_refusal_shows_the_sum() -> None:
    memory = MemoryBudget(4 * GIB)
    memory.admit("p", GIB, pinned=True)
    memory.admit("b", 2 * GIB)
    memory.enter("b")
    with pytest.raises(Refused) as caught:
        memory.admit("n", 2 * GIB)
    assert caught.value.kind is Kind.UNAVAILABLE
    assert caught.value.text == (
        "model 'n' needs 2.00 GiB of a memory budget of 4.00 GiB, and 'p' 1.00 GiB (pinned), 'b' 2.00 GiB (busy)"
        " cannot go now"
    )
    with pytest.raises(Refused, match=r"'n' needs 9\.00 GiB of a memory budget of 4\.00 GiB$"):
        MemoryBudget(4 * GIB).admit("n", 9 * GIB)


def test_a_model_that_is_admitted_again_keeps_its_requests_and_is_counted_once() -> None:
    memory = MemoryBudget(10)
    memory.admit("a", 6)
    memory.enter("a")
    assert memory.admit("a", 8) == ()
    assert memory.standing() == [Standing("a", 8, 1, False)]


def test_without_a_budget_everything_is_admitted() -> None:
    memory = MemoryBudget(0)
    assert [memory.admit(name, 2**60) for name in NAMES] == [()] * 4
    assert memory.resize("a", 2**61) == ()
