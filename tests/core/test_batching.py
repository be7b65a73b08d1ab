"""The dynamic batcher: a table of cases, and its invariants."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.core.batching import (
    BUCKET_GROWTH,
    BUCKET_WIDTH_MIN,
    Batch,
    Batcher,
    BatchLimits,
    Idle,
    WaitUntil,
    bucket_bounds,
)


def batcher(**changes: float) -> Batcher[str]:
    return Batcher(
        BatchLimits(**{"max_batch": 4, "max_delay_s": 1.0, "queue_max": 100, "padded_length_max": 8192, **changes}),
        length_max=512,
    )


def offer(target: Batcher[str], *items: tuple[str, int, float]) -> None:
    for item in items:
        assert target.offer(*item)


def test_an_empty_queue_is_idle() -> None:
    assert batcher().poll(0.0) == Idle()


def test_single_item_waits_for_a_batch_until_its_delay_ends() -> None:
    waiting = batcher()
    offer(waiting, ("a", 10, 5.0))
    assert waiting.poll(5.0) == WaitUntil(6.0)
    assert waiting.poll(5.999) == WaitUntil(6.0)
    assert waiting.poll(6.0) == Batch(("a",), 10)
    assert waiting.poll(6.0) == Idle()


def test_item_without_a_delay_is_batched_immediately() -> None:
    waiting = batcher(max_delay_s=0.0)
    offer(waiting, ("a", 10, 5.0))
    assert waiting.poll(5.0) == Batch(("a",), 10)


def test_full_batch_runs_at_once_and_the_rest_waits_its_own_delay() -> None:
    waiting = batcher()
    offer(waiting, *((name, 10, 5.0 + at / 10) for at, name in enumerate("abcde")))
    assert waiting.poll(5.4) == Batch(tuple("abcd"), 10)
    assert waiting.poll(5.4) == WaitUntil(6.4)


def test_due_batch_includes_younger_items_of_its_bucket() -> None:
    waiting = batcher()
    offer(waiting, ("a", 9, 0.0), ("b", 12, 0.9))
    assert waiting.poll(1.0) == Batch(("a", "b"), 12)


def test_items_of_very_different_length_are_not_batched_together() -> None:
    waiting = batcher(max_delay_s=0.0)
    offer(waiting, ("long", 400, 0.0), ("short", 5, 0.1), ("long too", 390, 0.2))
    assert waiting.poll(1.0) == Batch(("long", "long too"), 400)
    assert waiting.poll(1.0) == Batch(("short",), 5)


def test_a_full_bucket_does_not_overtake_an_older_item_that_is_due() -> None:
    waiting = batcher()
    offer(waiting, ("old", 400, 0.0), *((name, 10, 0.5) for name in "abcd"))
    assert waiting.poll(1.0).__class__ is Batch
    waiting = batcher()
    offer(waiting, ("old", 400, 0.0), *((name, 10, 0.5) for name in "abcd"))
    assert waiting.poll(0.9) == Batch(tuple("abcd"), 10), "not due yet, so the full one goes"
    assert waiting.poll(1.0) == Batch(("old",), 400)


def test_batch_of_long_items_is_limited_by_padded_length() -> None:
    waiting = batcher(padded_length_max=1024, max_delay_s=9.0)
    offer(waiting, *((name, 500, 0.0) for name in "abc"))
    first = waiting.poll(0.0)
    assert isinstance(first, Batch)
    assert first.length * len(first.ids) <= 1024
    assert len(first.ids) < 3


def test_full_batch_queue_refuses_items_until_one_is_cancelled() -> None:
    waiting = batcher(queue_max=2)
    offer(waiting, ("a", 10, 0.0), ("b", 10, 0.0))
    assert not waiting.offer("c", 10, 0.0)
    assert "c" not in waiting
    waiting.cancel("a")
    waiting.cancel("a")
    assert waiting.offer("c", 10, 0.0)
    assert waiting.poll(9.0) == Batch(("b", "c"), 10)


@given(length_max=st.integers(1, 10_000))
def test_buckets_cover_every_length_with_bounded_padding(length_max: int) -> None:
    bounds = bucket_bounds(length_max)
    assert bounds[-1] >= length_max
    for below, bound in zip((0, *bounds), bounds, strict=False):
        shortest = below + 1
        assert shortest <= bound <= max(shortest + BUCKET_WIDTH_MIN - 1, shortest * BUCKET_GROWTH)


@pytest.mark.parametrize("length", [0, 513 * 2])
def test_length_outside_the_buckets_is_an_error(length: int) -> None:
    with pytest.raises(AssertionError):
        batcher().offer("a", length, 0.0)


class BatcherMachine(RuleBasedStateMachine):
    """Drives a batcher beside a plain list of what waits."""

    @initialize(
        max_batch=st.integers(1, 5),
        delay=st.sampled_from([0.0, 0.5, 2.0]),
        queue_max=st.integers(1, 12),
        padded=st.sampled_from([64, 512, 8192]),
    )
    def begin(self, max_batch: int, delay: float, queue_max: int, padded: int) -> None:
        self.limits = BatchLimits(max_batch, delay, queue_max, padded)
        self.batcher: Batcher[int] = Batcher(self.limits, length_max=128)
        self.waiting: dict[int, tuple[int, float]] = {}
        self.now = 100.0
        self.made = 0

    @rule(length=st.integers(1, 128))
    def offer(self, length: int) -> None:
        taken = self.batcher.offer(self.made, length, self.now)
        assert taken == (len(self.waiting) < self.limits.queue_max)
        if taken:
            self.waiting[self.made] = (length, self.now)
        self.made += 1

    @rule(passed=st.sampled_from([0.0, 0.25, 1.0, 5.0]))
    def pass_time(self, passed: float) -> None:
        self.now += passed

    @precondition(lambda self: self.made > 0)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        id = data.draw(st.integers(0, self.made))
        self.batcher.cancel(id)
        self.waiting.pop(id, None)

    @rule()
    def poll(self) -> None:
        oldest_due = min((since for _, since in self.waiting.values()), default=math.inf) + self.limits.max_delay_s
        match self.batcher.poll(self.now):
            case Idle():
                assert not self.waiting
            case WaitUntil(at):
                assert self.now < at == oldest_due, "an item is held past its deadline"
            case Batch(ids, length):
                self._check(ids, length)

    def _check(self, ids: tuple[int, ...], length: int) -> None:
        assert len(set(ids)) == len(ids) <= self.limits.max_batch
        lengths = [self.waiting[id][0] for id in ids]  # KeyError: lost, duplicated or cancelled
        assert length == max(lengths)
        assert length <= max(min(lengths) + BUCKET_WIDTH_MIN - 1, min(lengths) * BUCKET_GROWTH)
        assert len(ids) == 1 or length * len(ids) <= self.limits.padded_length_max
        assert list(ids) == sorted(ids), "first in, first out"
        bounds = bucket_bounds(128)
        bucket = next(b for b in bounds if b >= length)
        below = max((b for b in bounds if b < bucket), default=0)
        mates = [id for id, (each, _) in self.waiting.items() if below < each <= bucket]
        assert list(ids) == mates[: len(ids)], "nobody of the bucket is passed over"
        heads_due = [since for _, since in self.waiting.values() if since + self.limits.max_delay_s <= self.now]
        mine = self.waiting[ids[0]][1]
        assert not heads_due or mine <= min(heads_due), "an older item that is due goes first"
        for id in ids:
            del self.waiting[id]

    @invariant()
    def the_count_is_right(self) -> None:
        if hasattr(self, "batcher"):
            assert len(self.batcher) == len(self.waiting)


TestBatcherMachine = BatcherMachine.TestCase
