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
            st.sampled_from(["admit", "admit", "pin", "enter", "leave", "resize", "trim", "remove"]),
            st.sampled_from(NAMES),
            st.integers(0, 12),
        ),
        max_size=50,
    )
)
def test_only_idle_unpinned_models_are_evicted_as_needed_within_the_budget(
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
            pinned = sum(each.size_bytes for other, each in before.items() if other != name and each.pinned)
            if pinned + size > 10:
                with pytest.raises(Refused):
                    memory.admit(name, size, pinned=operation == "pin")
                assert held(memory) == before
                continue
            admitted = memory.admit(name, size, pinned=operation == "pin")
            if others + size - sum(may_go.values()) > 10:
                assert admitted is None, "busy ones do not go"
                assert held(memory) == before
                continue
            assert admitted is not None
            victims = admitted
            assert memory.used_bytes <= 10
            for victim in victims:
                assert memory.used_bytes + before[victim].size_bytes > 10, "it need not have gone"
        elif operation == "enter":
            memory.enter(name)
        elif operation == "leave" and name in before and before[name].busy:
            memory.leave(name)
        elif operation == "resize":
            memory.resize(name, size)
        elif operation == "trim":
            used_last = next(reversed(before), "")
            victims = memory.trim()
            assert used_last not in victims
            idle = [o for o, e in before.items() if e.size_bytes and not e.busy and not e.pinned and o != used_last]
            assert memory.used_bytes <= 10 or set(victims) == set(idle), "as far as that helps"
        elif operation == "remove":
            memory.remove(name)
        assert not any(before[victim].busy or before[victim].pinned for victim in victims)
        assert not any(victim in memory for victim in victims)
        assert memory.used_bytes == sum(each.size_bytes for each in memory.standing())


def test_eviction_takes_least_recently_used_models_and_spares_superfluous_ones() -> None:
    memory = MemoryBudget(10)
    for name, size in (("a", 4), ("b", 4), ("c", 2)):
        memory.admit(name, size)
    memory.enter("a")
    memory.leave("a")
    memory.leave("unknown")
    assert memory.admit("d", 3) == ("b",)
    assert [each.name for each in memory.standing()] == ["c", "a", "d"]
    assert memory.admit("e", 4) == ("a",), "without c's 2 bytes it would still not fit, with a's 4 it does"


def test_growth_beyond_the_budget_evicts_least_recently_used_models() -> None:
    memory = MemoryBudget(10)
    for name in NAMES[:3]:
        memory.admit(name, 3, pinned=name == "b")
    memory.resize("c", 6)
    assert memory.trim() == ("a",)
    memory.resize("c", 12)
    assert memory.trim() == ()
    assert memory.used_bytes == 15, "more than the budget: nobody is left who may go"


def test_a_model_that_may_fit_later_is_deferred_without_changes() -> None:
    memory = MemoryBudget(10)
    memory.admit("a", 6)
    memory.enter("a")
    assert memory.admit("b", 6) is None
    assert memory.standing() == [Standing("a", 6, 1, False)]
    memory.leave("a")
    assert memory.admit("b", 6) == ("a",)


@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["idle", "busy", "pinned"])), max_size=6), st.data())
def test_relief_names_sufficient_and_necessary_models(models: list[tuple[int, str]], data: st.DataObject) -> None:
    memory = MemoryBudget(sum(size for size, _ in models))
    for number, (size, kind) in enumerate(models):
        memory.admit(str(number), size, pinned=kind == "pinned")
        if kind == "busy":
            memory.enter(str(number))
    may = [str(number) for number, (_, kind) in enumerate(models) if kind != "pinned"]
    ripe = data.draw(st.lists(st.sampled_from(may), unique=True)) if may else []
    size = data.draw(st.integers(0, memory.budget_bytes))
    chosen = memory.relief("new", size, [*ripe, "gone"])
    staying = sum(each.size_bytes for name, each in held(memory).items() if each.pinned or each.busy or name in ripe)
    sizes = {name: held(memory)[name].size_bytes for name in ripe}
    lacking = staying + size - memory.budget_bytes
    if lacking <= 0 or sum(sizes.values()) < lacking:
        assert chosen == ()
        return
    freed = sum(sizes[name] for name in chosen)
    assert freed >= lacking
    assert all(freed - sizes[name] < lacking for name in chosen)


def test_models_of_size_zero_are_not_evicted_and_pinned_memory_limits_the_rest() -> None:
    memory = MemoryBudget(10)
    memory.admit("nothing", 0)
    memory.admit("a", 6)
    memory.admit("p", 3, pinned=True)
    assert memory.admit("b", 7) == ("a",)
    assert [memory.most_bytes(name) for name in ("b", "p")] == [7, 10]


def test_no_model_fits_beside_pinned_models_that_exceed_the_budget() -> None:
    memory = MemoryBudget(10)
    memory.admit("p", 5, pinned=True)
    memory.resize("p", 11)
    with pytest.raises(Refused, match=r"pinned models leave 0\.00 GiB"):
        memory.admit("n", 0)


def test_memory_refusal_shows_the_calculation() -> None:
    memory = MemoryBudget(4 * GIB)
    with pytest.raises(Refused, match=r"^needs 9\.00 GiB, more than the memory budget of 4\.00 GiB$") as caught:
        memory.admit("huge:1#5", 9 * GIB)
    assert caught.value.kind is Kind.UNAVAILABLE
    memory.admit("p", GIB, pinned=True)
    text = r"^needs 3\.50 GiB, but pinned models leave 3\.00 GiB of the memory budget of 4\.00 GiB$"
    with pytest.raises(Refused, match=text):
        memory.admit("n", 7 * GIB // 2)
    with pytest.raises(Refused, match="more than the memory budget of"):
        memory.admit("n", 9 * GIB)


def test_memory_refusal_shows_a_budget_without_unit_in_bytes() -> None:
    with pytest.raises(Refused, match=r"^needs 0\.25 GiB, more than the memory budget of 2048 bytes$"):
        MemoryBudget(2048).admit("n", GIB // 4)


def test_a_model_that_is_admitted_again_keeps_its_requests_and_is_counted_once() -> None:
    memory = MemoryBudget(10)
    memory.admit("a", 6)
    memory.enter("a")
    assert memory.admit("a", 8) == ()
    assert memory.standing() == [Standing("a", 8, 1, False)]


def test_without_a_budget_everything_is_admitted() -> None:
    memory = MemoryBudget(0)
    assert [memory.admit(name, 2**60) for name in NAMES] == [()] * 4
    memory.resize("a", 2**61)
    assert memory.trim() == ()
