"""Sequence batching under random events in any order."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from forebay.core.serving.config import SequenceBatching
from forebay.core.serving.errors import Refused
from forebay.core.serving.sequences import Life, Run, Sequencer

Operation = tuple[str, int, str, int]
"""What, which, flags of a request, seconds since the one before."""


class World:
    """A model version with two instances, and what must be true of it at any time. Items are numbers that grow."""

    def __init__(self, oldest: bool, max_batch: int) -> None:
        batching = SequenceBatching(idle_max_s=2.0, oldest=oldest, delay_s=1.0, minimum_slot_utilization=1.0)
        self.served: Sequencer[int] = Sequencer("m", batching, max_batch, [0, 1])
        self.rows_max = max(1, max_batch)
        self.instances, self.ever = [0, 1], [0, 1]
        self.retired: list[int] = []
        self.running: dict[int, Run[int]] = {}
        self.offered: list[int] = []
        self.left: Counter[int] = Counter()
        self.home: dict[Life, int] = {}
        self.last: dict[Life, int] = {}
        self.now = 0.0

    def follow(self, number: int, operation: Operation) -> None:
        what, which, flags, seconds = operation
        self.now += seconds
        if what == "offer":
            self.offer(number, which, flags, seconds)
        elif what == "run":
            self.run(self.instances[which % len(self.instances)])
        elif what == "done" and self.running:
            self.done(sorted(self.running)[which % len(self.running)])
        elif what == "cancel" and self.offered:
            self.left.update(self.served.cancel(self.offered[-min(which, len(self.offered))], self.now))
        elif what == "expire":
            self.expire()
        elif what == "lost":
            self.left.update(self.served.lost(self.instances[0], self.now))
            self.running.pop(self.instances[0], None)
        elif what == "retire":
            self.retired.append(self.instances.pop(0))
            self.served.retire(self.retired[-1])
            self.ever.append(self.ever[-1] + 1)
            self.instances.append(self.ever[-1])
            self.served.add(self.instances[-1], self.now)
        elif what == "keep" and self.retired:
            self.instances.append(self.retired.pop())
            self.served.add(self.instances[-1], self.now)
        assert self.served.waiting == len(self.offered) - sum(self.left.values())

    def offer(self, number: int, corrid: int, flags: str, seconds: int) -> None:
        try:
            self.served.offer(
                number, corrid, start="(" in flags, end=")" in flags, rows=1, shape=seconds % 2, now=self.now,
                timeout_s=seconds * 2.0,
            )  # fmt: skip
        except Refused:
            assert "(" not in flags
        else:
            self.offered.append(number)

    def run(self, instance: int) -> None:
        if instance in self.running:
            return
        polled = self.served.poll(instance, self.now)
        if not isinstance(polled, Run):
            return
        self.running[instance] = polled
        assert any(row.item is not None for row in polled.rows)
        assert len(polled.rows) <= self.rows_max
        for row in polled.rows:
            assert (row.item is None) is (row.life is None)
            if row.item is not None and row.life is not None:
                assert self.home.setdefault(row.life, instance) == instance
                assert self.last.get(row.life, -1) < row.item, "in order"
                assert (row.life in self.last) is not row.start
                self.last[row.life] = row.item
                self.left[row.item] += 1
        busy = [row.life for run in self.running.values() for row in run.rows if row.life is not None]
        assert len(busy) == len(set(busy)), "one request of a sequence at a time"

    def done(self, instance: int) -> None:
        self.served.done(self.running.pop(instance), self.now)

    def expire(self) -> None:
        self.left.update(self.served.expire(self.now))
        due = self.served.due()
        assert due is None or due > self.now

    def finish(self) -> None:
        for _ in range(len(self.offered) + 2):
            self.now += 10.0
            self.expire()
            for instance in self.ever:
                self.run(instance)
                if instance in self.running:
                    self.done(instance)


@settings(max_examples=examples(300))
@given(
    oldest=st.booleans(),
    max_batch=st.integers(0, 3),
    operations=st.lists(
        st.tuples(
            st.sampled_from(
                ["offer"] * 6 + ["run"] * 4 + ["done"] * 3 + ["cancel", "expire", "lost", "retire", "keep"]
            ),
            st.integers(1, 4),
            st.sampled_from(["(", "", "", ")", "()"]),
            st.integers(0, 3),
        ),
        max_size=80,
    ),
)
def test_every_request_leaves_once_in_order_and_no_slot_leaks(
    oldest: bool, max_batch: int, operations: list[Operation]
) -> None:
    world = World(oldest, max_batch)
    for number, operation in enumerate(operations):
        world.follow(number, operation)
    world.finish()
    assert world.left == Counter(world.offered)
    assert [world.served.sequences, world.served.waiting, world.served.due()] == [0, 0, None]
    assert all(world.served.retired(each) for each in world.ever if each not in world.instances)
