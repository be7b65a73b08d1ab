"""What a router infers of caches and queues from its own records."""

from hypothesis import given
from hypothesis import strategies as st
from tests.sim.rivals.fleet import ask, states

from forebay.sim.rivals.history import Counted, Expected, Lately, Unread
from forebay.sim.rivals.values import held

IDS = ("a", "b", "c")
PROMPTS = st.lists(st.integers(0, 3), max_size=4).map(
    lambda path: tuple(hash(tuple(path[:n])) for n in range(len(path)))
)


@given(st.lists(st.tuples(st.sampled_from(IDS), PROMPTS, st.booleans()), max_size=20), PROMPTS)
def test_blocks_are_kept_while_they_are_referenced(
    steps: list[tuple[str, tuple[int, ...], bool]], prompt: tuple[int, ...]
) -> None:
    counted, added = Counted(), list[tuple[str, tuple[int, ...]]]()
    for id, blocks, adds in steps:
        if adds or (id, blocks) not in added:
            counted.add(id, blocks)
            added.append((id, blocks))
        else:
            counted.remove(id, blocks)
            added.remove((id, blocks))
        there = {one: {block for id, blocks in added if id == one for block in blocks} for one in IDS}
        assert [counted.count(id) for id in IDS] == [len(there[id]) for id in IDS]
        assert counted.depths(prompt, IDS) == [held(prompt, there[id]) for id in IDS]
    for id, blocks in added:
        counted.remove(id, blocks)
    assert not counted.owners


@given(st.lists(st.tuples(st.sampled_from(IDS), PROMPTS), max_size=20), st.integers(0, 6))
def test_recently_used_blocks_are_kept_up_to_a_size(steps: list[tuple[str, tuple[int, ...]]], size: int) -> None:
    lately, used = Lately(), {id: list[int]() for id in IDS}
    for id, blocks in steps:
        lately.add(id, blocks)
        lately.trim(id, size)
        kept = [*(block for block in used[id] if block not in blocks), *dict.fromkeys(blocks)]
        used[id] = kept[len(kept) - size :] if len(kept) > size else kept
        assert {block for block, mask in lately.owners.items() if mask & lately.bit(id)} == set(used[id])


def test_sent_prompt_is_predicted_as_cached_for_a_while() -> None:
    expected = Expected(5.0)
    expected.add("a", (1, 2), now=0.0)
    expected.add("a", (1, 3), now=3.0)

    assert expected.depths((1, 2), ["a", "b"], now=4.9) == [2, 0]
    assert expected.depths((1, 2), ["a", "b"], now=5.0) == [1, 0]
    assert expected.depths((1, 3), ["a", "b"], now=7.9) == [2, 0]
    assert expected.depths((1, 3), ["a", "b"], now=8.0) == [0, 0]


def test_prompt_counts_as_queued_until_its_first_token_or_end() -> None:
    unread, (one, other) = Unread(), states(2)
    unread.charge(ask(1, 1), one, 500)
    unread.charge(ask(2, 1), one, 40)
    unread.charge(ask(1, 1), other, 300)  # a second try of the first
    unread.release(ask(1, 1), one)
    unread.release(ask(1, 1), one)

    assert (unread.tokens(one.id), unread.tokens(other.id)) == (40, 300)
