"""The prefix index finds what was sent, forgets what a cache must have evicted, and is bounded."""

import gc
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.prefix.index import SWEEP_BLOCKS, _Guess
from forebay.core.routing import PrefixIndex

chains = st.lists(st.integers(0, 5), max_size=6).map(
    lambda path: tuple(hash(tuple(path[: n + 1])) for n in range(len(path)))
)
"""Chained: two prompts share hashes exactly as far as they begin alike."""
actions = st.lists(st.tuples(st.sampled_from(["note", "note", "note", "join", "leave"]), st.integers(0, 9), chains))


class Cache:
    """The same for one replica, the plain way."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: OrderedDict[int, None] = OrderedDict()

    def note(self, blocks: tuple[int, ...]) -> None:
        for block in reversed(blocks):
            self.held.pop(block, None)
            self.held[block] = None
        while len(self.held) > self.size:
            self.held.popitem(last=False)

    def depth(self, blocks: tuple[int, ...]) -> int:
        return next((n for n, block in enumerate(blocks) if block not in self.held), len(blocks))


@given(st.integers(1, 8), actions, chains)
def test_index_depths_equal_the_hits_of_each_replicas_own_cache(
    size: int, todo: list[tuple[str, int, tuple[int, ...]]], asked: tuple[int, ...]
) -> None:
    index = PrefixIndex()
    caches: dict[int, Cache] = {}
    for what, which, blocks in todo:
        if what == "join" or not caches:
            mask = index.join(size)
            assert mask.bit_count() == 1
            assert mask not in caches
            caches[mask] = Cache(size)
            continue
        mask = sorted(caches)[which % len(caches)]
        if what == "note":
            index.note(mask, blocks, 0.0)
            caches[mask].note(blocks)
        else:
            index.leave(mask)
            del caches[mask]
        masks = list(caches)
        assert index.depths(asked, masks) == [caches[mask].depth(asked) for mask in masks]
    assert index.depths((), list(caches)) == [0] * len(caches)


@given(st.integers(1, 10), st.lists(st.tuples(st.integers(0, 2), chains)))
def test_index_size_is_bounded(pairs_max: int, todo: list[tuple[int, tuple[int, ...]]]) -> None:
    index = PrefixIndex(pairs_max)
    masks = [index.join() for _ in range(3)]
    for n, (which, blocks) in enumerate(todo):
        index.note(masks[which], blocks, 0.0)
        assert len(index) <= pairs_max
        if n % 4 == 3:
            index.leave(masks[which])
            masks[which] = index.join()


def test_eviction_keeps_the_first_blocks_of_a_prompt_longest() -> None:
    index = PrefixIndex()
    mask = index.join(4)
    index.note(mask, (1, 2, 3), 0.0)
    index.note(mask, (7, 8), 0.0)
    assert index.depths((1, 2, 3), [mask]) == [2]
    index.note(mask, tuple(range(20, 30)), 0.0)
    assert index.depths(tuple(range(20, 30)), [mask]) == [4]


def test_cache_size_of_a_replica_can_be_set_later() -> None:
    index = PrefixIndex()
    mask = index.join()
    index.note(mask, tuple(range(10)), 0.0)
    index.resize(mask, 6)
    index.note(mask, (0,), 0.0)
    assert len(index) == 6
    assert index.depths(tuple(range(10)), [mask]) == [6]
    index.resize(mask, 0)
    index.note(mask, tuple(range(10)), 0.0)
    assert len(index) == 10


def test_full_index_evicts_from_the_largest_share() -> None:
    index = PrefixIndex(pairs_max=100)
    large, small = index.join(), index.join()
    index.note(large, tuple(range(100)), 0.0)
    index.note(small, tuple(range(200, 230)), 0.0)
    assert index.depths(tuple(range(100)), [large]) == [70]
    assert index.depths(tuple(range(200, 230)), [small]) == [30]


@pytest.mark.parametrize("pairs_max", [10**6, 5 * SWEEP_BLOCKS])
def test_lost_replica_is_excluded_at_once_and_removed_incrementally(pairs_max: int) -> None:
    index = PrefixIndex(pairs_max)
    old, other = index.join(), index.join()
    prompt = tuple(range(4 * SWEEP_BLOCKS))
    index.note(old, prompt, 0.0)
    index.note(other, prompt[:10], 0.0)
    index.leave(old)
    new = index.join()
    assert new not in (old, other)
    assert index.depths(prompt, [other, new]) == [10, 0]
    while len(index) > 11:
        before = len(index)
        index.note(new, (0,), 0.0)
        assert before - len(index) <= SWEEP_BLOCKS + 1
    assert index.join() == old
    assert index.depths(prompt, [other, new, old]) == [10, 1, 0]


def test_predictions_of_a_lost_replica_are_freed_without_the_garbage_collector() -> None:
    def guesses() -> int:
        return sum(type(one) is _Guess for one in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before, index = guesses(), PrefixIndex()
        mask = index.join()
        index.note(mask, tuple(range(100)), 0.0)
        index.leave(mask)
        left = guesses() - before
    finally:
        gc.enable()
    assert left <= 1, "of a ring only its end refers to itself"


def test_leaving_replica_without_blocks_leaves_the_index_empty() -> None:
    index = PrefixIndex()
    first = index.join()
    index.leave(first)
    assert index.join() == first


def test_index_evicts_blocks_of_lost_replicas_first() -> None:
    index = PrefixIndex(pairs_max=3 * SWEEP_BLOCKS)
    lost, live = index.join(), index.join()
    index.note(lost, tuple(range(3 * SWEEP_BLOCKS)), 0.0)
    index.leave(lost)
    prompt = tuple(range(10**6, 10**6 + 3 * SWEEP_BLOCKS))
    index.note(live, prompt, 0.0)
    assert index.depths(prompt, [live]) == [len(prompt)]
