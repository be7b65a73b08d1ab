"""The rate limiter."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.serving.config import Resource
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.limiter import Amount, Limiter


def one(count: int, name: str = "R", is_global: bool = False) -> list[Resource]:
    return [Resource(name, count, is_global)]


@pytest.mark.parametrize("priorities", [(1, 2), (1, 1, 1), (1, 3, 4), (0, 2)])
def test_rate_limiter_shares_turns_by_priority(priorities: tuple[int, ...]) -> None:
    limiter: Limiter[int] = Limiter()
    for key, priority in enumerate(priorities):
        limiter.add(key, one(1), priority=priority)
        limiter.ask(key)
    turns: Counter[int] = Counter()
    for _ in range(2400):
        (key,) = limiter.grants()
        turns[key] += 1
        limiter.release(key)
        limiter.ask(key)
    shares = [turns[key] * max(1, priority) for key, priority in enumerate(priorities)]
    assert max(shares) - min(shares) <= 2 * max(priorities)


def test_idle_instance_earns_no_extra_turns() -> None:
    limiter: Limiter[str] = Limiter()
    limiter.add("early", one(1))
    limiter.add("late", one(1))
    for _ in range(100):
        limiter.ask("early")
        assert limiter.grants() == ["early"]
        limiter.release("early")
    limiter.ask("late")
    limiter.ask("early")
    turns = []
    for _ in range(4):
        turns += limiter.grants()
        limiter.release(turns[-1])
        limiter.ask(turns[-1])
    assert turns == ["late", "early", "late", "early"]


def test_a_large_claim_is_not_starved_and_blocks_only_its_competitors() -> None:
    limiter: Limiter[str] = Limiter([Amount("R", 2), Amount("S", 9)])
    limiter.add("large", [*one(2), *one(1, "S")])
    limiter.add("small", one(1))
    limiter.add("small too", one(1))
    limiter.add("other", one(1, "S"))
    limiter.add("free", [])
    limiter.ask("small")
    assert limiter.grants() == ["small"]
    for key in ("large", "small too", "other", "free"):
        limiter.ask(key)
    assert limiter.grants() == ["other", "free"]
    limiter.release("small")
    assert limiter.grants() == ["large"]
    limiter.release("large")
    assert limiter.grants() == ["small too"]


@pytest.mark.parametrize(
    ("amounts", "text"),
    [
        (
            [Amount("R", 3)],
            'Resource count for "R" is limited to 3 which will prevent scheduling of one or more model instances, the'
            " minimum required count is 4",
        ),
        ([Amount("other", 9)], "is limited to 0 which"),
        ([Amount("R", 9, device=1)], "is limited to 0 which"),
        ([Amount("R", 4)], None),
        ([Amount("R", 1), Amount("R", 4, device=0)], None),
        ([], None),
    ],
)
def test_an_instance_that_could_never_run_is_refused(amounts: list[Amount], text: str | None) -> None:
    limiter: Limiter[str] = Limiter(amounts)
    if text is None:
        limiter.check([(one(4), 0)])
        limiter.add("a", one(4))
        return
    with pytest.raises(Refused) as caught:
        limiter.check([(one(1), 0), (one(4), 0), (one(2), 0)])
    with pytest.raises(Refused) as caught:
        limiter.add("a", one(4))
    assert caught.value.kind is Kind.INVALID_ARGUMENT
    assert text in caught.value.text
    limiter.add("a", one(0))


def test_withdrawn_and_removed_instances_block_no_others() -> None:
    limiter: Limiter[str] = Limiter([Amount("R", 2)])
    for key, count in (("a", 1), ("b", 2), ("c", 2), ("d", 1)):
        limiter.add(key, one(count))
        limiter.ask(key)
    assert limiter.grants() == ["a"]
    limiter.withdraw("b")
    limiter.withdraw("a")
    assert limiter.grants() == []
    limiter.remove("c")
    limiter.remove("unknown")
    assert limiter.grants() == ["d"]


def test_global_resource_has_the_largest_amount_of_any_device() -> None:
    limiter: Limiter[str] = Limiter([Amount("R", 1), Amount("R", 2, device=7)])
    for key, device in (("a", 0), ("b", 1), ("c", 2)):
        limiter.add(key, one(1, is_global=True), device)
        limiter.ask(key)
    assert limiter.grants() == ["a", "b"]


def test_resource_amounts_are_per_device() -> None:
    limiter: Limiter[str] = Limiter()
    for key, device in (("a", 0), ("b", 1), ("c", 1)):
        limiter.add(key, one(3), device)
        limiter.ask(key)
    assert limiter.grants() == ["a", "b"]


def test_resource_declared_both_global_and_per_device_is_rejected() -> None:
    limiter: Limiter[str] = Limiter()
    limiter.add("a", one(1))
    with pytest.raises(Refused, match='Resource "R" is present as both global and device-specific resource in the'):
        limiter.add("b", one(1, is_global=True))
    with pytest.raises(Refused, match="both global and device-specific"):
        limiter.check([(one(1, is_global=True), 0)])
    limiter.check([(one(1, is_global=True), 0)], instead_of={"a"})
    limiter.remove("a")
    limiter.add("b", one(1, is_global=True))


@given(
    amounts=st.booleans(),
    operations=st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "ask", "ask", "ask", "release", "withdraw", "remove"]), st.integers(0, 4)
        ),
        max_size=60,
    ),
)
def test_grants_fit_the_resources_and_never_leave_them_idle(amounts: bool, operations: list[tuple[str, int]]) -> None:
    limiter: Limiter[int] = Limiter([Amount("R", 5), Amount("S", 4)] if amounts else [])
    known, waiting, running = set[int](), set[int](), set[int]()

    def needs(key: int) -> dict[str, int]:
        return {"R": key, "S": 4 - key}

    def most() -> dict[str, int]:
        return {"R": 5, "S": 4} if amounts else {n: max((needs(k)[n] for k in known), default=0) for n in "RS"}

    for operation, key in operations:
        if operation == "add" and key not in known:
            limiter.add(key, [Resource(name, count) for name, count in needs(key).items()], priority=key)
            known.add(key)
        elif operation == "ask" and key in known - waiting - running:
            limiter.ask(key)
            waiting.add(key)
        elif operation == "release":
            limiter.release(key)
            running.discard(key)
        elif operation == "withdraw":
            limiter.withdraw(key)
            waiting.discard(key)
        elif operation == "remove":
            limiter.remove(key)
            for keys in (known, waiting, running):
                keys.discard(key)
        granted = limiter.grants()
        assert set(granted) <= waiting
        waiting -= set(granted)
        running |= set(granted)
        used = {name: sum(needs(each)[name] for each in running) for name in "RS"}
        if granted:
            assert all(used[name] <= most()[name] or not any(needs(k)[name] for k in granted) for name in "RS")
        if waiting and not running:
            raise AssertionError("somebody must run")
    for key in sorted(running):
        limiter.release(key)
    for _ in range(len(waiting)):
        (*_, last) = granted = limiter.grants() or [-1]
        for key in granted if last >= 0 else ():
            waiting.discard(key)
            limiter.release(key)
    assert not waiting
