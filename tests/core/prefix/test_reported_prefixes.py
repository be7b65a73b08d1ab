"""Prefix-cache contents as replicas report them: reports replace guesses, are bounded, and validated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.model import BlockNews
from forebay.core.prefix.blocks import CHANGES_MAX, HASH_MAX, SEQ_MAX, flaw
from forebay.core.prefix.index import GUESS_S, SWEEP_BLOCKS
from forebay.core.routing import PrefixIndex

BLOCKS = st.integers(0, 12)
LISTS = st.lists(BLOCKS, max_size=8).map(tuple)
WHATS = st.sampled_from(["note", "note", "tell", "tell", "reset", "swap"])
PAUSES = st.sampled_from([0.0, 0.1, GUESS_S / 2, GUESS_S, 2 * GUESS_S])
Action = tuple[str, int, tuple[int, ...], tuple[int, ...], float]
ACTIONS = st.lists(st.tuples(WHATS, st.integers(0, 2), LISTS, LISTS, PAUSES), max_size=30)


class NaiveReplicaIndex:
    """The same of one replica, the plain way."""

    def __init__(self) -> None:
        self.tells = False
        self.told: set[int] = set()
        self.sent: dict[int, float] = {}

    def note(self, blocks: tuple[int, ...], now: float) -> None:
        self.sent.update((block, now) for block in blocks if block not in self.told)
        self.doubt(now)

    def tell(self, stored: tuple[int, ...], removed: tuple[int, ...], now: float, *, reset: bool) -> None:
        self.tells = True
        if reset:
            self.told, self.sent = set(), {}
        for block in removed:
            self.told.discard(block)
            self.sent.pop(block, None)
        for block in stored:
            self.told.add(block)
            self.sent.pop(block, None)
        self.doubt(now)

    def doubt(self, now: float) -> None:
        if self.tells:
            self.sent = {block: since for block, since in self.sent.items() if now - since < GUESS_S}

    def depth(self, blocks: tuple[int, ...]) -> int:
        held = self.told | self.sent.keys()
        return next((n for n, block in enumerate(blocks) if block not in held), len(blocks))


@given(ACTIONS, st.lists(LISTS, min_size=1, max_size=3))
def test_index_equals_a_naive_model_after_any_reports_and_requests(
    todo: list[Action], asked: list[tuple[int, ...]]
) -> None:
    index, now = PrefixIndex(), 100.0
    masks = [index.join() for _ in range(3)]
    beliefs = [NaiveReplicaIndex() for _ in masks]
    for what, which, some, others, pause in todo:
        now += pause
        if what == "note":
            index.note(masks[which], some, now)
            beliefs[which].note(some, now)
        elif what == "swap":
            index.leave(masks[which])
            masks[which], beliefs[which] = index.join(), NaiveReplicaIndex()
        else:
            reset = what == "reset"
            index.tell(masks[which], some, others, now, reset=reset)
            beliefs[which].tell(some, () if reset else others, now, reset=reset)
        for blocks in asked:
            assert index.depths(blocks, masks) == [belief.depth(blocks) for belief in beliefs]
        for mask, belief in zip(masks, beliefs, strict=True):
            assert {block for block in range(13) if index.told(mask, block)} == belief.told
    for mask in masks:
        index.leave(mask)
    other = index.join()
    for _ in range(5):
        index.note(other, (), now)
    assert len(index) == 0


@given(st.integers(1, 10), ACTIONS)
def test_reports_never_exceed_the_index_size_limit(pairs_max: int, todo: list[Action]) -> None:
    index = PrefixIndex(pairs_max)
    masks = [index.join() for _ in range(3)]
    for now, (what, which, some, others, _) in enumerate(todo):
        if what == "note":
            index.note(masks[which], some, now)
        elif what == "swap":
            index.leave(masks[which])
            masks[which] = index.join()
        else:
            index.tell(masks[which], some, others, now, reset=what == "reset")
        assert len(index) <= pairs_max


def test_sent_prompt_is_predicted_as_cached_until_its_report_is_due() -> None:
    index = PrefixIndex()
    mask = index.join()
    index.tell(mask, (), (), 0.0, reset=True)
    index.note(mask, (1, 2, 3), 1.0)
    index.tell(mask, (1, 2), (), 1.0 + GUESS_S / 2, reset=False)
    assert index.depths((1, 2, 3), [mask]) == [3]
    assert [index.told(mask, block) for block in (1, 2, 3)] == [True, True, False]
    index.tell(mask, (), (), 1.0 + GUESS_S, reset=False)
    assert index.depths((1, 2, 3), [mask]) == [2]


def test_guesses_for_a_replica_without_reports_are_kept() -> None:
    index = PrefixIndex()
    mask = index.join()
    index.note(mask, (1, 2, 3), 0.0)
    index.note(mask, (9,), 100 * GUESS_S)
    assert index.depths((1, 2, 3), [mask]) == [3]


def test_one_replica_cannot_use_the_whole_index() -> None:
    index = PrefixIndex()
    mask = index.join()
    for start in range(0, 4 * CHANGES_MAX, CHANGES_MAX):
        index.tell(mask, range(start, start + CHANGES_MAX), (), 0.0, reset=False)
    assert len(index) == CHANGES_MAX
    index.note(mask, (10**6,), 0.0)
    index.tell(mask, (10**6,), (), 0.0, reset=False)
    assert index.depths((10**6,), [mask]) == [1]
    assert not index.told(mask, 10**6)


def test_guesses_are_evicted_before_reported_blocks() -> None:
    index = PrefixIndex(pairs_max=10)
    mask, other = index.join(), index.join()
    index.tell(mask, range(6), (), 0.0, reset=True)
    index.note(mask, (10, 11, 12), 0.0)
    index.tell(other, (20, 21), (), 0.0, reset=True)
    assert index.depths((10, 11, 12), [mask]) == [2]
    index.tell(other, range(22, 28), (), 0.0, reset=False)
    assert [index.told(mask, block) for block in range(6)] == [False] * 4 + [True] * 2
    assert index.depths(tuple(range(20, 28)), [other]) == [8]


def test_reports_of_a_lost_replica_are_removed_incrementally() -> None:
    index = PrefixIndex()
    lost, live = index.join(), index.join()
    index.tell(lost, range(4 * SWEEP_BLOCKS), (), 0.0, reset=True)
    index.leave(lost)
    while len(index):
        before = len(index)
        index.tell(live, (), (), 0.0, reset=False)
        assert before - len(index) == SWEEP_BLOCKS


GOOD = BlockNews(7, False, False, (1, HASH_MAX), (0,))


@pytest.mark.parametrize(
    ("news", "asked", "fine"),
    [
        (GOOD, 7, True),
        (GOOD, 1, True),
        (GOOD, 8, False),
        (GOOD, 0, False),
        (BlockNews(1, True, True), 0, True),
        (BlockNews(1, True, True), 99, True),
        (BlockNews(0, True, False), 0, False),
        (BlockNews(-5, False, False), 3, False),
        (BlockNews(SEQ_MAX + 1, True, False), 0, False),
        (BlockNews(7, False, False, (HASH_MAX + 1,)), 3, False),
        (BlockNews(7, False, False, (), (-1,)), 3, False),
        (BlockNews(7, True, False, tuple(range(CHANGES_MAX))), 3, True),
        (BlockNews(7, True, False, tuple(range(CHANGES_MAX)), (1,)), 3, False),
        (BlockNews(7, True, False, (1,) * (CHANGES_MAX + 1)), 3, False),
    ],
)
def test_invalid_reports_are_ignored(news: BlockNews, asked: int, fine: bool) -> None:
    assert (not flaw(news, asked)) is fine


def test_block_reported_as_removed_is_no_longer_predicted() -> None:
    index = PrefixIndex()
    mask = index.join()
    index.note(mask, (1, 2), 0.0)
    index.tell(mask, (), (2,), 0.0, reset=False)
    assert index.depths((1, 2), [mask]) == [1]
