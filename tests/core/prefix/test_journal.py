"""A worker's cache journal: any reader that polls it learns the contents of the engine's prefix cache."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.model import BlockNews
from forebay.core.prefix.blocks import BLOCK_BYTES, BLOCKS_MAX, CHANGES_MAX, blocks, flaw
from forebay.core.prefix.journal import BlockCache, Journal
from forebay.core.routing import PrefixIndex

BLOCKS = st.lists(st.integers(0, 9), max_size=5)
ACTIONS = st.lists(st.tuples(st.sampled_from(["apply", "apply", "clear", "ask 0", "ask 1"]), BLOCKS, BLOCKS))


class Reader:
    """A gateway's part: what it knows, and up to which change."""

    def __init__(self) -> None:
        self.seq = 0
        self.known: set[int] = set()
        self.resets = 0

    def ask(self, journal: Journal) -> None:
        news = journal.since(self.seq, estimated=False)
        assert not flaw(news, self.seq)
        assert not set(news.stored) & set(news.removed)
        self.seq = news.seq
        self.resets += news.reset
        self.known = set(news.stored) if news.reset else (self.known | set(news.stored)) - set(news.removed)


@given(ACTIONS)
def test_polling_at_any_times_yields_the_cache_contents(todo: list[tuple[str, list[int], list[int]]]) -> None:
    journal, held = Journal(), set[int]()
    readers = {"ask 0": Reader(), "ask 1": Reader()}
    for what, some, others in todo:
        if what == "apply":
            journal.apply(some, others)
            held = (held - set(others)) | set(some)
        elif what == "clear":
            journal.clear()
            held = set()
        else:
            readers[what].ask(journal)
            assert readers[what].known == held
    for reader in readers.values():
        reader.ask(journal)
        assert reader.known == held


@given(st.lists(st.tuples(st.integers(1, CHANGES_MAX), st.booleans()), max_size=6))
def test_a_poll_is_bounded_and_a_reader_that_falls_behind_gets_all(steps: list[tuple[int, bool]]) -> None:
    journal, reader = Journal(), Reader()
    reader.ask(journal)
    first, behind, resets = 0, 0, reader.resets
    held = range(0)
    for count, asks in steps:
        journal.apply(range(first, first + count), held)
        behind += count + len(held)
        held = range(first, first + count)
        first += count
        if asks:
            reader.ask(journal)
            resets += behind > CHANGES_MAX
            behind = 0
            assert reader.known == set(held)
            assert reader.resets == resets


def test_too_large_cache_is_reported_in_part() -> None:
    journal = Journal()
    journal.apply(range(2 * CHANGES_MAX), ())
    news = journal.since(0, estimated=True)
    assert news.reset
    assert news.estimated
    assert len(news.stored) == CHANGES_MAX
    assert len(msgspec.json.encode(news)) < 128 * 1024
    journal.apply((), range(2 * CHANGES_MAX))
    assert set(journal.since(news.seq, estimated=True).removed) == set(news.stored)


def test_cursor_of_an_earlier_process_gets_a_full_snapshot() -> None:
    journal = Journal()
    journal.apply((1, 2), ())
    for seq in (-1, 0, 99):
        assert journal.since(seq, estimated=False) == BlockNews(3, True, False, (1, 2))
    journal.clear()
    assert journal.since(3, estimated=False) == BlockNews(4, True, False)
    assert journal.since(4, estimated=False) == BlockNews(4, False, False)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(
    lambda path: tuple(hash(tuple(path[: n + 1])) for n in range(len(path)))
)


@given(st.lists(PROMPTS, max_size=20), st.integers(0, 60))
def test_cache_keeps_recently_used_blocks_and_reports_changes(
    prompts: list[tuple[int, ...]], tokens_max: int
) -> None:
    cache, journal = BlockCache(), Journal()
    held: list[int] = []  # last used first
    for prompt in prompts:
        depth = next((n for n, block in enumerate(prompt) if block not in held), len(prompt))
        assert cache.use(prompt) == 10 * depth
        cache.store(prompt, 10 * len(prompt))
        cache.shrink(tokens_max)
        held = [*prompt, *(block for block in held if block not in prompt)][: tokens_max // 10]
        news = cache.news()
        if news is not None:
            journal.apply(*news)
        assert cache.news() is None
        assert set(journal.since(0, estimated=False).stored) == set(held)


def test_cache_size_is_bounded_by_the_report_size() -> None:
    cache = BlockCache()
    cache.store(tuple(range(CHANGES_MAX + 10)), 0)
    cache.shrink(0)
    news = cache.news()
    assert news is not None
    assert news[0] == tuple(range(CHANGES_MAX - 1, -1, -1))


def test_index_fed_by_a_journal_equals_the_cache() -> None:
    cache, journal, index = BlockCache(), Journal(), PrefixIndex()
    mask, seq = index.join(), 0
    for start in range(0, 50, 5):
        cache.store(tuple(range(start, start + 10)), 100)
        cache.shrink(250)
        journal.apply(*(cache.news() or ((), ())))
        news = journal.since(seq, estimated=False)
        index.tell(mask, news.stored, news.removed, 0.0, reset=news.reset)
        seq = news.seq
        assert index.depths(tuple(range(start, start + 10)), [mask]) == [10]
    assert len(index) == 25


@given(st.binary(max_size=4 * BLOCK_BYTES), st.binary(max_size=BLOCK_BYTES))
def test_blocks_of_a_prompt_prefix_are_a_prefix_of_its_blocks(start: bytes, rest: bytes) -> None:
    short, long = blocks(memoryview(start), "m"), blocks(memoryview(start + rest), "m")
    assert len(short) == len(start) // BLOCK_BYTES
    assert long[: len(short)] == short
    assert len(blocks(memoryview(bytes((BLOCKS_MAX + 2) * BLOCK_BYTES)), "m")) == BLOCKS_MAX
