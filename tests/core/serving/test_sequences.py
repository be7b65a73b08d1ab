"""Sequence batching."""

import gc
import weakref

import pytest

from forebay.core.serving.batcher import Idle, WaitUntil
from forebay.core.serving.config import Control, Datatype, SequenceBatching
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.sequences import Life, Row, Run, Sequencer, control_values, id_flaw

DIRECT = SequenceBatching(idle_max_s=5.0)
OLDEST = SequenceBatching(idle_max_s=5.0, oldest=True)
ITERATIVE = SequenceBatching(idle_max_s=5.0, iterative=True)
BOTH = pytest.mark.parametrize("batching", [DIRECT, OLDEST], ids=["direct", "oldest"])


def sequencer(batching: SequenceBatching, max_batch: int = 2, instances: int = 1) -> Sequencer[str]:
    return Sequencer("m", batching, max_batch, range(instances))


def offer(
    served: Sequencer[str],
    item: str,
    *,
    corrid: int | str | None = None,
    now: float = 0.0,
    timeout_s: float = 0.0,
    shape: object = None,
) -> None:
    """`a1` is of sequence `a`; `(a1` starts it and `a1)` ends it."""
    served.offer(
        item, item.strip("()")[0] if corrid is None else corrid, start=item.startswith("("), end=item.endswith(")"),
        rows=1, shape=shape, now=now, timeout_s=timeout_s,
    )  # fmt: skip


def offer_all(served: Sequencer[str], *items: str) -> None:
    for item in items:
        offer(served, item)


def run(served: Sequencer[str], instance: int = 0, now: float = 0.0) -> Run[str]:
    polled = served.poll(instance, now)
    assert isinstance(polled, Run)
    return polled


def items(run: Run[str]) -> list[str | None]:
    return [row.item for row in run.rows]


def turn(served: Sequencer[str], instance: int = 0, now: float = 0.0) -> list[str | None]:
    """What runs, done at once."""
    ran = run(served, instance, now)
    served.done(ran, now)
    return items(ran)


def test_direct_strategy_keeps_each_sequence_in_its_batch_slot() -> None:
    served = sequencer(DIRECT, max_batch=3)
    offer_all(served, "(a1", "(b1", "(c1", "a2", "c2)", "(d1)", "b2")
    assert turn(served) == ["(a1", "(b1", "(c1"]
    assert turn(served) == ["a2", "b2", "c2)"]
    assert turn(served) == [None, None, "(d1)"], "it came from the backlog into the place that got free"
    offer_all(served, "b3")
    assert turn(served) == [None, "b3"], "nothing behind the last that has a request"
    assert served.poll(0, 0.0) == Idle()


def test_busy_instance_gets_no_run_and_sequences_stay_with_their_instance() -> None:
    served = sequencer(DIRECT, instances=2)
    offer_all(served, "(a1", "(b1", "(c1")
    assert [served.sequences, served.waiting] == [3, 3]
    first, second = run(served, 0), run(served, 1)
    assert [items(first), items(second)] == [["(a1", "(c1"], ["(b1"]]
    offer_all(served, "a2", "b2")
    assert served.poll(0, 0.0) == Idle()
    served.done(first, 0.0)
    assert turn(served, 0) == ["a2"]
    served.done(second, 0.0)
    assert turn(served, 1) == ["b2"]
    assert served.poll(7, 0.0) == Idle()


def test_direct_strategy_runs_the_longest_waiting_request_and_those_of_its_shape() -> None:
    served = sequencer(DIRECT, max_batch=3)
    for number, (item, shape) in enumerate([("(a1", 4), ("(b1", 5), ("(c1", 4), ("a2", 4)]):
        offer(served, item, shape=shape, now=float(number))
    assert turn(served) == ["(a1", None, "(c1"]
    assert turn(served) == [None, "(b1"]
    assert turn(served) == ["a2"]


@pytest.mark.parametrize(
    ("delay_s", "utilization", "waits"), [(1.0, 0.6, True), (1.0, 0.5, False), (0.0, 1.0, False), (1.0, 0.0, False)]
)
def test_direct_strategy_delays_only_with_a_delay_and_a_minimum_utilization(
    delay_s: float, utilization: float, waits: bool
) -> None:
    batching = SequenceBatching(delay_s=delay_s, minimum_slot_utilization=utilization)
    served = sequencer(batching, max_batch=4)
    offer(served, "(a1", now=2.0)
    offer(served, "(b1", now=2.5)
    if waits:
        assert served.poll(0, 2.6) == WaitUntil(3.0)
    assert turn(served, now=3.0 if waits else 2.6) == ["(a1", "(b1"]


def test_oldest_strategy_batches_one_request_per_sequence_oldest_first() -> None:
    served = sequencer(
        SequenceBatching(oldest=True, candidates_max=3, preferred_sizes=(2,), delay_s=9.0), max_batch=2
    )
    offer_all(served, "(a1", "a2", "(b1", "(c1")
    first = run(served)
    assert items(first) == ["(a1", "(b1"]
    assert served.poll(0, 0.0) == WaitUntil(9.0)
    served.done(first, 0.0)
    assert turn(served) == ["(c1", "a2"]
    assert sequencer(OLDEST, max_batch=0).poll(0, 0.0) == Idle()


@BOTH
def test_the_next_request_of_a_sequence_runs_when_the_one_before_has(batching: SequenceBatching) -> None:
    served = sequencer(batching, max_batch=1)
    offer_all(served, "(a1", "a2", "a3)")
    assert [turn(served) for _ in range(3)] == [["(a1"], ["a2"], ["a3)"]]
    assert [served.sequences, served.waiting] == [0, 0]


@BOTH
def test_sequence_backlog_gets_slots_in_order_with_all_its_requests(batching: SequenceBatching) -> None:
    served = sequencer(batching, max_batch=1)
    offer_all(served, "(a1", "(b1", "(c1", "b2)", "a2)")
    assert served.sequences == 3
    assert [turn(served)[0] for _ in range(3)] == ["(a1", "a2)", "(b1"]
    offer_all(served, "(b3)", "c2)")
    assert [turn(served)[0] for _ in range(4)] == ["b2)", "(c1", "c2)", "(b3)"]


@BOTH
def test_run_rows_have_start_and_end_flags_and_each_start_begins_a_new_sequence(batching: SequenceBatching) -> None:
    served = sequencer(batching)
    offer_all(served, "(a1", "(a2", "a3)")
    rows: list[Row[str]] = []
    for _ in range(3):
        ran = run(served)
        served.done(ran, 0.0)
        rows += ran.rows
    one, two, three = rows
    assert [row[3:] for row in (one, two, three)] == [(True, False), (True, False), (False, True)]
    assert one.life is not two.life is three.life
    assert three.life is not None
    assert three.life.corrid == "a"


@pytest.mark.parametrize(
    ("row", "values"),
    [
        (Row(0, "x", Life(7), True, False), [1.5, 0, 1, 7]),
        (Row(0, "x", Life(7), True, True), [1.5, 1, 1, 7]),
        (Row(0, "x", Life(7)), [-1.5, 0, 1, 7]),
        (Row[str](0), [-1.5, 0, 0, 0]),
    ],
)
def test_control_inputs_have_the_values_of_the_configuration(row: Row[str], values: list[float]) -> None:
    controls = [
        Control("S", "START", Datatype.FP32, (-1.5, 1.5)),
        Control("E", "END", Datatype.BOOL),
        Control("R", "READY", Datatype.INT32),
        Control("C", "CORRID", Datatype.UINT64),
    ]
    assert list(control_values(controls, row)) == list(zip(controls, values, strict=True))
    (told,) = control_values([Control("C", "CORRID", Datatype.BYTES)], Row[str](0))
    assert told[1] == ""


@pytest.mark.parametrize(
    ("datatype", "corrid", "flaw"),
    [
        (Datatype.UINT64, 3, ""),
        (Datatype.INT32, 3, ""),
        (Datatype.BYTES, "x", ""),
        (None, "x", ""),
        (Datatype.INT64, "x", "data-type is 'BYTES', but model 'm' expects 'INT64'"),
        (Datatype.BYTES, 3, "sequence batching control 'C' data-type is 'UINT64', but model 'm' expects 'BYTES'"),
        (Datatype.BYTES, 0, ""),  # none was sent: that is another error
        (Datatype.UINT64, "", ""),
        (None, "x" * 129, "string correlation ID cannot be longer than 128 characters"),
    ],
)
def test_correlation_ids_must_be_of_the_type_that_the_model_wants(
    datatype: Datatype | None, corrid: int | str, flaw: str
) -> None:
    controls = [Control("S", "START", Datatype.BOOL)]
    controls += [] if datatype is None else [Control("C", "CORRID", datatype)]
    found = id_flaw("m", SequenceBatching(controls=tuple(controls)), corrid)
    assert found.endswith(flaw)
    assert bool(found) is bool(flaw)


@pytest.mark.parametrize(
    ("corrid", "start_rows", "closed", "kind", "text"),
    [
        (
            5, (False, 1), False, Kind.INVALID_ARGUMENT,
            "inference request for sequence 5 to model 'm' must specify the START flag on the first request of the"
            " sequence",
        ),
        (
            0, (True, 1), False, Kind.INVALID_ARGUMENT,
            "inference request to model 'm' must specify a non-zero or non-empty correlation ID",
        ),
        ("", (True, 1), False, Kind.INVALID_ARGUMENT, "must specify a non-zero or non-empty correlation ID"),
        (
            5, (True, 2), False, Kind.INVALID_ARGUMENT,
            "inference request to model 'm' must specify batch-size 1 due to requirements of sequence batcher",
        ),
        (
            5, (True, 1), True, Kind.UNAVAILABLE,
            "Server is stopping, scheduler for model has stopped accepting new inference requests",
        ),
    ],
)  # fmt: skip
def test_invalid_sequence_requests_have_the_error_messages_of_triton(
    corrid: int | str, start_rows: tuple[bool, int], closed: bool, kind: Kind, text: str
) -> None:
    served = sequencer(DIRECT)
    offer_all(served, "(a1")
    if closed:
        served.end()
    with pytest.raises(Refused) as caught:
        served.offer("x", corrid, start=start_rows[0], end=False, rows=start_rows[1], shape=None, now=0.0)
    assert caught.value.kind is kind
    assert text in caught.value.text


@BOTH
def test_an_idle_sequence_ends_but_not_while_something_of_it_waits_or_runs(batching: SequenceBatching) -> None:
    served = sequencer(batching, max_batch=1)
    offer_all(served, "(a1", "(b1)")
    assert served.due() is None
    slow = run(served)
    assert served.expire(100.0) == []
    served.done(slow, 100.0)
    assert served.due() == 105.0
    offer(served, "a2", now=104.0)
    assert served.due() is None
    assert served.expire(110.0) == []
    assert turn(served, now=110.0) == ["a2"]
    assert served.expire(114.0) == []
    assert served.expire(115.0) == []
    with pytest.raises(Refused, match="must specify the START flag"):
        offer(served, "a3", now=115.0)
    assert turn(served) == ["(b1)"]
    assert [served.sequences, served.due()] == [0, None]


@BOTH
def test_requests_that_wait_too_long_for_a_slot_leave_with_their_whole_sequence(batching: SequenceBatching) -> None:
    served = sequencer(batching, max_batch=1)
    offer(served, "(a1", timeout_s=1.0)
    offer(served, "(b1", timeout_s=9.0)
    offer(served, "b2", timeout_s=2.0)
    offer(served, "b3", timeout_s=8.0)
    offer(served, "(c1", timeout_s=3.0)
    assert served.due() == 2.0
    assert served.expire(2.0) == ["(b1", "b2", "b3"]
    with pytest.raises(Refused, match="must specify the START flag"):
        offer(served, "b4", now=2.0)
    offer_all(served, "a2)")
    assert [turn(served, now=2.0) for _ in range(3)] == [["(a1"], ["a2)"], ["(c1"]]
    assert served.expire(3.0) == [], "it has its slot"
    assert served.due() == 7.0


@BOTH
def test_the_next_sequence_no_longer_waits_for_a_slot_once_the_last_request_of_another_runs(
    batching: SequenceBatching,
) -> None:
    served = sequencer(batching, max_batch=1)
    offer_all(served, "(a1")
    offer(served, "a2)")
    offer(served, "(b1)", timeout_s=1.0)
    offer(served, "(c1)", timeout_s=2.0)
    assert turn(served) == ["(a1"]
    last = run(served)
    assert [served.expire(1.0), served.expire(2.0)] == [[], ["(c1)"]], "as Triton, whose slot is free already"
    served.done(last, 9.0)
    assert turn(served, now=9.0) == ["(b1)"]
    assert [served.sequences, served.due()] == [0, None]


@BOTH
@pytest.mark.parametrize(
    ("offered", "cancelled", "gone", "runs"),
    [
        ("(a1 a2 a3", "a2", ["a2", "a3"], ["(a1", "(b1)"]),
        ("(a1 a2 a3", "(a1", ["(a1", "a2", "a3"], ["(b1)"]),
        ("(a1 (a2 a3)", "(a1", ["(a1"], ["(a2", "a3)", "(b1)"]),
        ("(a1 a2 (a3)", "a2", ["a2"], ["(a1", "(a3)", "(b1)"]),
        ("(a1 a2)", "a2)", ["a2)"], ["(a1", "(b1)"]),
        ("(a1)", "?", [], ["(a1)", "(b1)"]),
        ("(a1)", "(b1)", ["(b1)"], ["(a1)"]),
    ],
)
def test_cancelled_request_ends_its_sequence_and_frees_the_slot(
    batching: SequenceBatching, offered: str, cancelled: str, gone: list[str], runs: list[str]
) -> None:
    served = sequencer(batching, max_batch=1)
    offer_all(served, *offered.split(), "(b1)")
    assert served.cancel(cancelled, 0.0) == gone
    assert [turn(served)[0] for _ in runs] == runs
    assert [served.poll(0, 0.0), served.sequences, served.waiting] == [Idle(), 0, 0]


@BOTH
def test_of_two_sequences_under_one_id_only_that_of_the_cancelled_request_ends(batching: SequenceBatching) -> None:
    served = sequencer(batching)
    offer_all(served, "(a1", "(a2")
    assert served.cancel("(a1", 0.0) == ["(a1"]
    offer_all(served, "a3)")
    assert [turn(served), turn(served)] == [["(a2"], ["a3)"]]


@BOTH
def test_running_sequence_request_cannot_be_cancelled(batching: SequenceBatching) -> None:
    served = sequencer(batching)
    offer_all(served, "(a1", "a2")
    under_way = run(served)
    assert served.cancel("(a1", 0.0) == []
    assert served.cancel("a2", 0.0) == ["a2"]
    assert served.sequences == 1
    served.done(under_way, 0.0)
    assert served.sequences == 0


@BOTH
def test_lost_instance_ends_its_sequences_and_the_backlog_continues(batching: SequenceBatching) -> None:
    served = sequencer(batching, max_batch=2)
    offer_all(served, "(a1", "(b1", "(c1", "c2)")
    under_way = run(served)
    offer_all(served, "(d1)", "a2", "a3)")
    served.done(under_way, 0.0)
    offer_all(served, "b2", "b3")
    again = run(served)
    assert items(again) == ["a2", "b2"]
    assert sorted(served.lost(0, 0.0)) == ["a3)", "b3"]
    assert served.lost(7, 0.0) == []
    with pytest.raises(Refused, match="must specify the START flag"):
        offer(served, "b4")
    fresh = run(served)
    assert items(fresh) == ["(c1", "(d1)"]
    served.done(again, 0.0)
    assert served.poll(0, 0.0) == Idle(), "the run that has ended is not that which is under way"
    served.done(fresh, 0.0)
    assert turn(served) == ["c2)"]
    assert served.sequences == 0


@BOTH
def test_no_sequence_gets_a_slot_of_an_instance_that_is_not_back_yet(batching: SequenceBatching) -> None:
    served = sequencer(batching, max_batch=1, instances=2)
    offer_all(served, "(a1")
    assert served.lost(0, 0.0) == ["(a1"]
    offer_all(served, "(b1", "(c1)")
    assert turn(served, 1) == ["(b1"]
    assert served.poll(1, 0.0) == Idle()
    assert turn(served, 0) == ["(c1)"], "it is back"
    served.lost(0, 0.0)
    served.retire(0)
    assert served.retired(0)


class _Held:
    """The state of a sequence."""


@BOTH
def test_state_of_an_ended_sequence_is_not_kept_until_its_timeout(batching: SequenceBatching) -> None:
    served = sequencer(batching, max_batch=1)
    states = []
    for number in range(500):
        offer(served, f"(b{number})")
        offer(served, f"(a{number})", timeout_s=1e9)
        for _ in range(2):
            ran = run(served)
            assert ran.rows[0].life is not None
            ran.rows[0].life.state = held = _Held()
            states.append(weakref.ref(held))
            served.done(ran, 0.0)
    gc.collect()
    assert sum(state() is not None for state in states) < 100


@BOTH
def test_shutdown_ends_all_waiting_requests(batching: SequenceBatching) -> None:
    served = sequencer(batching, max_batch=1)
    offer_all(served, "(a1", "a2", "(b1)")
    offer(served, "(c1", timeout_s=1.0)
    under_way = run(served)
    assert served.end() == ["a2", "(b1)", "(c1"]
    served.done(under_way, 0.0)
    assert [served.sequences, served.waiting, served.due(), served.poll(0, 0.0)] == [0, 0, None, Idle()]
    with pytest.raises(Refused, match="Server is stopping"):
        offer(served, "(d1")


def test_lost_instance_returns_requests_of_its_dynamic_batcher() -> None:
    served = sequencer(OLDEST)
    offer_all(served, "(a1", "a2", "(b1)")
    assert served.lost(0, 0.0) == ["(a1", "a2", "(b1)"]
    assert [served.waiting, served.sequences, served.poll(0, 0.0)] == [0, 0, Idle()]


@BOTH
def test_retiring_instance_finishes_its_sequences(batching: SequenceBatching) -> None:
    served = sequencer(batching, max_batch=1, instances=2)
    offer_all(served, "(a1")
    served.retire(0)
    served.retire(1)
    assert [served.retired(0), served.retired(1)] == [False, True]
    offer_all(served, "(b1)", "a2)")
    assert [turn(served)[0], turn(served)[0]] == ["(a1", "a2)"]
    assert served.retired(0)
    served.add(2, 0.0)
    last = run(served, 2)
    served.retire(2)
    served.done(last, 0.0)
    served.done(last, 0.0)
    assert items(last) == ["(b1)"]
    assert served.retired(2)


@BOTH
def test_a_retiring_instance_can_be_kept_with_its_sequences(batching: SequenceBatching) -> None:
    served = sequencer(batching, max_batch=2)
    offer_all(served, "(a1")
    served.retire(0)
    offer_all(served, "(b1)", "(c1)", "a2")
    assert turn(served)[0] == "(a1"
    served.add(0, 0.0)
    assert turn(served) == ["a2", "(b1)"]
    assert turn(served)[-1] == "(c1)"
    assert not served.retired(0)


def test_iterative_model_reruns_a_request_until_it_is_finished() -> None:
    served = sequencer(ITERATIVE)
    offer(served, "a", corrid=0)
    offer(served, "b", corrid=0)
    first = run(served)
    assert [(row.item, row.start, row.life and row.life.corrid) for row in first.rows] == [
        ("a", True, 1),
        ("b", True, 2),
    ]
    served.done(first, 0.0, again={"a"})
    second = run(served)
    assert [(row.item, row.start) for row in second.rows] == [("a", False)]
    assert second.rows[0].life is first.rows[0].life
    offer(served, "(c1")
    assert served.sequences == 2
    served.done(second, 0.0)
    assert turn(served) == [None, "(c1"]
    assert served.sequences == 0


def test_iterative_request_is_not_rerun_after_its_instance_is_lost() -> None:
    for retired in (False, True):
        served = sequencer(ITERATIVE)
        offer(served, "a", corrid=0)
        under_way = run(served)
        served.lost(0, 0.0)
        if retired:
            served.retire(0)
        assert served.done(under_way, 0.0, again={"a"}) == ["a"]
        assert served.waiting == 0
