"""One simulated replica: compared with a naive one that simulates every step, and its invariants."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, TypedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.sim.engine.naive_replica import PlainReplica

from forebay.sim.engine import EngineEvent, Job, JobTooLarge, Kind, Replica, StepTime, hardware

H100 = hardware("h100_sxm", "8B", 1)
BLOCK = 4
SMALL = replace(H100, step=StepTime(0.0017, 0.0031, 0.00071, 1.7, 0.0000131, 0.000113, 0.000057))
"""In which every term counts, at a few tokens."""


class Act(NamedTuple):
    """Something done to a replica, so long after the one before."""

    after_s: float
    what: str
    job: Job
    factor: float
    who: int
    """Is cancelled: counted from the last one offered."""


class Sizes(TypedDict):
    """Of a replica."""

    block_tokens: int
    sequences_max: int
    step_tokens_max: int
    kv_tokens: int


def chained(path: list[int]) -> tuple[int, ...]:
    """Ids of the blocks of a prompt, each of which stands for all before it too."""
    ids, id = [], 0
    for step in path:
        id = id * 3 + step + 1
        ids.append(id)
    return tuple(ids)


JOBS = st.builds(
    lambda path, more, output: Job(0, max(1, len(path) * BLOCK + more), output, chained(path)),
    st.lists(st.integers(0, 1), max_size=5),
    st.integers(-6, 9),
    st.integers(1, 12),
)
WHATS = st.sampled_from(["offer", "offer", "offer", "offer", "cancel", "slow", "hang", "resume", "look"])
ACTS = st.lists(
    st.builds(Act, st.floats(0.0, 0.06), WHATS, JOBS, st.sampled_from([0.5, 1.0, 3.0]), st.integers(0, 5)),
    max_size=30,
).map(lambda acts: [act._replace(job=act.job._replace(id=at)) for at, act in enumerate(acts)])
SIZES = st.builds(
    Sizes,
    block_tokens=st.just(BLOCK),
    sequences_max=st.integers(1, 5),
    step_tokens_max=st.integers(5, 24),
    kv_tokens=st.integers(43, 90),
)
"""The KV cache holds at least the largest job."""


def played(replica: Replica | PlainReplica, acts: list[Act]) -> Iterator[float]:
    """Do all of it, then let the replica come to its end; the time after each."""
    now = 0.0
    offered: list[int] = []
    for act in acts:
        now += act.after_s
        if act.what == "offer":
            replica.offer(act.job, now)
            offered.append(act.job.id)
        elif act.what == "cancel" and offered:
            replica.cancel(offered[-1 - act.who % len(offered)], now)
        elif act.what == "slow":
            replica.slow(act.factor, now)
        elif act.what == "hang":
            replica.hang(now)
        elif act.what == "resume":
            replica.resume(now)
        yield now
    replica.resume(now)
    yield now


def run_replica(acts: list[Act], sizes: Sizes, *, each_token: bool) -> tuple[Replica, list[EngineEvent]]:
    """What a replica tells when it is looked at after each act, and then as it asks for it."""
    replica = Replica(SMALL, each_token=each_token, **sizes)
    happened = []
    for now in played(replica, acts):
        happened += replica.advance(now)
    while replica.next_at < math.inf:
        happened += replica.advance(replica.next_at)
    return replica, happened


def run_naive(acts: list[Act], sizes: Sizes) -> PlainReplica:
    replica = PlainReplica(SMALL, **sizes)
    for _ in played(replica, acts):
        pass
    replica.run_to(math.inf)
    return replica


def assert_same_events(one: list[EngineEvent], other: list[EngineEvent]) -> None:
    assert [event._replace(at=0.0) for event in one] == [event._replace(at=0.0) for event in other]
    assert [event.at for event in one] == pytest.approx([event.at for event in other], rel=1e-9)


@settings(max_examples=examples(250))
@given(ACTS, SIZES)
def test_token_times_equal_those_of_a_naive_scheduler(acts: list[Act], sizes: Sizes) -> None:
    replica, happened = run_replica(acts, sizes, each_token=True)
    plain = run_naive(acts, sizes)

    assert_same_events(happened, plain.out)
    assert replica.preemptions == plain.preemptions


@settings(max_examples=examples(250))
@given(ACTS, SIZES)
def test_results_are_independent_of_step_merging(acts: list[Act], sizes: Sizes) -> None:
    leaping, happened = run_replica(acts, sizes, each_token=False)
    stepping, all_happened = run_replica(acts, sizes, each_token=True)

    assert_same_events(happened, [event for event in all_happened if event.kind is not Kind.TOKEN])
    assert leaping.busy_s == pytest.approx(stepping.busy_s)
    for name in ("preemptions", "prefilled_tokens", "hit_tokens"):
        assert getattr(leaping, name) == getattr(stepping, name)


@given(ACTS, SIZES)
def test_results_are_independent_of_how_often_it_is_polled(acts: list[Act], sizes: Sizes) -> None:
    seldom = Replica(SMALL, **sizes)
    for _ in played(seldom, acts):
        pass

    happened = seldom.advance(1e6)

    assert happened == run_replica(acts, sizes, each_token=False)[1]
    assert seldom.next_at == math.inf


@settings(max_examples=examples(250))
@given(ACTS, SIZES)
def test_load_reports_equal_those_of_a_naive_replica(acts: list[Act], sizes: Sizes) -> None:
    replica, plain = Replica(SMALL, **sizes), PlainReplica(SMALL, **sizes)
    held: set[int] = set()

    for now, _ in zip(played(replica, acts), played(plain, acts), strict=True):
        replica.advance(now)
        plain.run_to(now)
        stored, removed = replica.news() or ((), ())
        assert not set(stored) & held
        assert set(removed) <= held
        held = (held | set(stored)) - set(removed)

        assert held == plain.pinned() | set(plain.idle)
        assert all(block in replica.cached for block in held)
        assert (replica.running, replica.waiting) == (len(plain.running), len(plain.waiting))
        assert replica.kv_used_tokens == plain.used() <= replica.kv_total_tokens
        assert replica.kv_used_tokens + (len(held) - len(plain.pinned())) * BLOCK <= replica.kv_total_tokens
        waiting = sum(row.job.prompt_tokens + row.made for row in plain.waiting)
        assert replica.waiting_tokens == waiting + sum(row.target - row.read for row in plain.running)


@settings(max_examples=examples(250))
@given(ACTS, SIZES, st.booleans())
def test_every_job_ends_once_and_the_kv_cache_is_freed(acts: list[Act], sizes: Sizes, each_token: bool) -> None:
    replica, happened = run_replica(acts, sizes, each_token=each_token)

    offered = {act.job.id: act.job for act in acts if act.what == "offer"}
    done = [event for event in happened if event.kind is Kind.DONE]
    first = [event for event in happened if event.kind is Kind.FIRST]
    assert (replica.running, replica.waiting, replica.waiting_tokens, replica.kv_used_tokens) == (0, 0, 0, 0)
    assert len({event.id for event in done}) == len(done)
    assert {event.id for event in done} <= {event.id for event in first}
    if not any(act.what == "cancel" for act in acts):
        assert {event.id for event in done} == set(offered)
        prompts = sum(job.prompt_tokens for job in offered.values())
        read = replica.prefilled_tokens + replica.hit_tokens
        assert read >= prompts if replica.preemptions else read == prompts
    assert [event.id for event in first] == sorted(event.id for event in first), "first come, first served"
    assert [event.at for event in happened] == sorted(event.at for event in happened)
    for event in done:
        assert event.tokens == offered[event.id].output_tokens
    for event in happened:
        assert 0 <= event.cached_tokens < offered[event.id].prompt_tokens
        assert each_token or event.kind is not Kind.TOKEN


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9), st.lists(st.integers(0, 3), max_size=9)), max_size=9)
)
def test_block_ids_without_a_chain_are_handled(prompts: list[tuple[int, int, list[int]]]) -> None:
    replica = Replica(SMALL, block_tokens=BLOCK, sequences_max=3, step_tokens_max=8, kv_tokens=40)
    for id, (prompt, output, ids) in enumerate(prompts):
        replica.offer(Job(id, prompt, output, tuple(ids)), id * 0.01)

    happened, held = [], set[int]()
    while replica.next_at < math.inf:
        happened += replica.advance(replica.next_at)
        held ^= set().union(*(replica.news() or ()))
        assert {id for id in range(4) if id in replica.cached} == held
        assert replica.kv_used_tokens <= 40

    assert [event.id for event in happened if event.kind is Kind.FIRST] == list(range(len(prompts)))
    assert sorted(event.id for event in happened if event.kind is Kind.DONE) == list(range(len(prompts)))
    assert replica.kv_used_tokens == 0


def test_single_prompt_takes_the_steps_of_the_formula() -> None:
    replica = Replica(H100, step_tokens_max=2048)
    step_s = H100.step.step_s

    replica.offer(Job(1, 5000, 3), 10.0)

    chunks = [(2048, 0), (2048, 2048), (904, 4096)]
    first = 10.0 + sum(step_s(n, n * (c + n / 2), 0, 0) for n, c in chunks)
    done = first + step_s(1, 0, 5001, 1) + step_s(1, 0, 5002, 1)
    assert_same_events(
        replica.advance(20.0),
        [EngineEvent(first, 1, Kind.FIRST, 1, 0), EngineEvent(done, 1, Kind.DONE, 3, 0)],
    )
    assert replica.busy_s == pytest.approx(done - 10.0)


def test_second_of_two_equal_prompts_prefills_only_its_last_token() -> None:
    replica = Replica(H100)
    replica.offer(Job(1, 1024, 1, (7, 8)), 0.0)
    replica.offer(Job(2, 1024, 1, (7, 8)), 1.0)

    happened = replica.advance(2.0)

    assert [event.cached_tokens for event in happened if event.kind is Kind.DONE] == [0, 1023]
    assert (replica.prefilled_tokens, replica.hit_tokens) == (1025, 1023)
    assert replica.news() == ((7, 8), ())
    assert replica.news() is None


def test_speed_factor_scales_times_exactly() -> None:
    times = []
    for row, speed in ((H100, 1.0), (H100, 2.0), (H100.scaled(0.5), 1.0)):
        replica = Replica(row, speed=speed)
        replica.offer(Job(1, 4000, 200), 0.0)
        times.append([event.at for event in replica.advance(100.0)])

    assert times[0] == pytest.approx([2 * at for at in times[1]])
    assert times[1] == pytest.approx(times[2])


def first_token_s(replica: Replica, id: int, now: float) -> float:
    """When the first token of a job comes."""
    while replica.next_at < math.inf:
        for event in replica.advance(replica.next_at):
            if event.id == id and event.kind is Kind.FIRST:
                return event.at - now
    raise AssertionError(f"job {id} never began")


@pytest.mark.parametrize("speed", [1.0, 2.0])
@pytest.mark.parametrize(
    ("before", "prompt", "blocks"),
    [
        ([], 1500, ()),
        ([Job(1, 100, 500)], 700, ()),
        ([Job(1, 3000, 5), Job(2, 9000, 50)], 6000, ()),
        ([Job(1, 3000, 500, (1, 2, 3, 4, 5)), Job(2, 20_000, 500), Job(3, 9000, 500, (7, 8, 9))], 4000, (1, 2, 3)),
        ([Job(1, 20_000, 500), Job(2, 9000, 500, (7, 8, 9))], 4000, (7, 8, 6)),
        ([Job(1, 20_000, 500, tuple(range(39)))], 20_100, tuple(range(39))),
    ],
)
def test_first_token_time_is_predicted_for_the_oracle(
    before: list[Job], prompt: int, blocks: tuple[int, ...], speed: float
) -> None:
    replica, now = Replica(H100, speed=speed), 0.3 / speed
    for job in before:
        replica.offer(job, 0.0)
    said, alone = replica.first_token_s(prompt, blocks, now), replica.read_s(prompt, blocks)
    replica.offer(Job(9, prompt, 1, blocks), now)

    assert said == pytest.approx(first_token_s(replica, 9, now), rel=0.1)
    assert 0 < alone <= said


def test_step_time_with_one_more_request_is_predicted_for_the_oracle() -> None:
    replica = Replica(H100, speed=2.0)
    replica.offer(Job(1, 100, 50), 0.0)
    replica.advance(replica.next_at)

    assert replica.token_s() == pytest.approx(H100.step.step_s(2, 0.0, 101, 2) / 2)


def test_prefill_estimate_is_finite_when_decodes_fill_every_step() -> None:
    replica = Replica(H100, sequences_max=1, step_tokens_max=1)
    replica.offer(Job(1, 1, 9), 0.0)
    replica.advance(replica.next_at)

    assert replica.read_s(3, ()) == pytest.approx(3 * H100.step.step_s(2, 1.5, 2, 1))


def test_stalled_replica_makes_no_progress() -> None:
    replica, other = Replica(H100), Replica(H100)
    for each in (replica, other):
        each.offer(Job(1, 4000, 200), 0.0)
    replica.hang(0.5)
    replica.hang(0.7)
    first = replica.advance(60.0)
    assert [event.kind for event in first] == [Kind.FIRST]
    assert replica.next_at == math.inf

    replica.resume(100.5)
    replica.resume(101.0)

    assert replica.advance(200.0)[-1].at == pytest.approx(other.advance(200.0)[-1].at + 100.0)


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (Job(2, 0, 5), "has 0 [+] 5 tokens"),
        (Job(2, 5, 0), "has 5 [+] 0 tokens"),
        (Job(1, 5, 5), "is already in progress"),
        (Job(2, 90, 12), "holds 100"),
    ],
)
def test_invalid_job_is_rejected(job: Job, text: str) -> None:
    replica = Replica(H100, kv_tokens=100)
    replica.offer(Job(1, 90, 11), 0.0)

    with pytest.raises(JobTooLarge if "holds" in text else ValueError, match=text):
        replica.offer(job, 0.0)

    assert (replica.running, replica.waiting) == (1, 0)


def test_step_token_limit_covers_every_sequence() -> None:
    with pytest.raises(ValueError, match="9 sequences need at least one token each, more than the step's 8"):
        Replica(H100, sequences_max=9, step_tokens_max=8)
