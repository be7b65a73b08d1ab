"""The request queue: order, rejection, preemption, and that no tenant starves or builds up credit."""

import math
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.admission import AGE_S, RETRY_AFTER_S_MAX, Band, DrainRate, Refused, RequestQueue, Ticket, preempt
from forebay.core.admission.band_queue import TENANTS_MAX, BandQueue, Entry
from forebay.core.errors import Code

SYSTEM, INTERACTIVE, DEFAULT, BATCH = Band


def room(size_max: int = 100, timeout_s: float = 1000.0) -> RequestQueue[str]:
    return RequestQueue(size_max, timeout_s)


def enter(waiting: RequestQueue[str], *tickets: tuple[str, Ticket], now: float = 0.0) -> None:
    for item, ticket in tickets:
        assert waiting.enter(item, ticket, now) is None


def go(waiting: RequestQueue[str], tickets: dict[str, Ticket]) -> str:
    """The next one goes to a replica."""
    item = next(iter(waiting))
    waiting.leave(item)
    waiting.served(tickets[item])
    return item


ORDERS: dict[str, tuple[list[Ticket], str]] = {
    "first come, first served": ([Ticket(), Ticket(), Ticket()], "abc"),
    "the higher band first": ([Ticket(BATCH), Ticket(), Ticket(SYSTEM), Ticket(INTERACTIVE)], "cdba"),
    "the earlier deadline first": ([Ticket(deadline=9.0), Ticket(deadline=7.0), Ticket(deadline=8.0)], "bca"),
    "the band counts more than the deadline": ([Ticket(deadline=1.0), Ticket(SYSTEM, deadline=9.0)], "ba"),
    "all of the tenant that waits longest": ([Ticket(tenant="z"), Ticket(tenant="y"), Ticket(tenant="z")], "acb"),
}


@pytest.mark.parametrize("case", ORDERS)
def test_queue_order_is_band_tenant_deadline_arrival(case: str) -> None:
    tickets, order = ORDERS[case]
    waiting = room()
    enter(waiting, *zip("abcd", tickets, strict=False))
    assert "".join(waiting.waiting()) == order
    waiting.leave(order[0])
    waiting.leave("never there")
    assert "".join(waiting) == order[1:]
    assert len(waiting) == len(order) - 1


def test_tenants_take_turns_by_tokens_and_not_by_requests() -> None:
    tickets = {
        f"{name}{n}": Ticket(tenant=name, work_tokens=work)
        for n in range(9)
        for name, work in (("a", 100.0), ("b", 300.0))
    }
    waiting = room()
    enter(waiting, *tickets.items())
    assert Counter(go(waiting, tickets)[0] for _ in range(8)) == {"a": 6, "b": 2}


def test_the_real_cost_of_a_response_decides_the_next_tenant() -> None:
    tickets = {item: Ticket(tenant=item[0], work_tokens=100.0) for item in ("a1", "b1", "a2", "b2", "a3")}
    waiting = room()
    enter(waiting, *tickets.items())
    assert [go(waiting, tickets), go(waiting, tickets)] == ["a1", "b1"]
    waiting.charge(tickets["a1"], 400.0)
    waiting.charge(tickets["b1"], -50.0)
    assert waiting.waiting() == ["b2", "a2", "a3"]
    waiting.charge(tickets["a1"], -451.0)
    assert waiting.waiting() == ["a2", "a3", "b2"]


def test_idle_tenant_earns_no_credit_across_an_empty_queue() -> None:
    waiting = room()
    for tenant, work in (("a", 100.0), ("b", 1000.0), ("a", 1.0)):
        waiting.served(Ticket(tenant=tenant, work_tokens=work))
    enter(waiting, ("a", Ticket(tenant="a")), ("b", Ticket(tenant="b")))
    waiting.charge(Ticket(tenant="b"), 2.0)
    assert waiting.waiting() == ["a", "b"]
    waiting.charge(Ticket(tenant="a"), 3.0)
    assert waiting.waiting() == ["b", "a"]


def test_a_tenant_with_one_request_at_a_time_is_charged_only_for_that() -> None:
    tickets = {item: Ticket(tenant=item[0], work_tokens=work) for item, work in (("a1", 150.0), ("a2", 150.0))}
    tickets |= {f"b{n}": Ticket(tenant="b", work_tokens=100.0) for n in range(3)}
    waiting = room()
    enter(waiting, *((item, ticket) for item, ticket in tickets.items() if item != "a2"))
    waiting.charge(tickets["b1"], 100.0)
    assert go(waiting, tickets) == "a1"
    enter(waiting, ("a2", tickets["a2"]))
    assert [go(waiting, tickets) for _ in range(3)] == ["b0", "a2", "b1"]


@pytest.mark.parametrize("waited", [True, False], ids=["from the room", "past an empty room"])
def test_idle_tenant_earns_no_credit(waited: bool) -> None:
    """B comes when A alone has been served for a while; from then on they take turns."""
    tickets = {f"{name}{n}": Ticket(tenant=name, work_tokens=100.0) for n in range(20) for name in "ba"}
    waiting = room()
    for n in range(10):
        if waited:
            enter(waiting, (f"a{n}", tickets[f"a{n}"]))
            go(waiting, tickets)
        else:
            waiting.served(tickets[f"a{n}"])
    enter(waiting, *((f"{name}{n}", tickets[f"{name}{n}"]) for n in range(10, 20) for name in "ba"))
    assert Counter(go(waiting, tickets)[0] for _ in range(10)) == {"a": 5, "b": 5}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=1, max_size=200))
def test_waiting_tenants_differ_by_at_most_two_requests_of_service(work: list[tuple[str, int]]) -> None:
    """The bound of the paper: while both wait, what two tenants were served differs by twice the largest request."""
    tickets = {f"{tenant}{n}": Ticket(tenant=tenant, work_tokens=tokens) for n, (tenant, tokens) in enumerate(work)}
    left = Counter(tenant for tenant, _ in work)
    waiting = room(200)
    enter(waiting, *tickets.items())
    served: Counter[str] = Counter()
    while waiting:
        item = go(waiting, tickets)
        served[item[0]] += int(tickets[item].work_tokens)
        left[item[0]] -= 1
        behind = [served[tenant] for tenant in left if left[tenant]]
        assert not behind or max(behind) - min(behind) <= 2 * 50


def test_token_counters_are_separate_for_each_band() -> None:
    waiting = room()
    waiting.served(Ticket(BATCH, "a", 1e6))
    enter(waiting, ("b", Ticket(tenant="b")), ("a", Ticket(tenant="a")))
    waiting.served(Ticket(DEFAULT, "b", 1.0))
    assert waiting.waiting() == ["a", "b"]


def test_a_full_queue_rejects_requests_that_outrank_no_other() -> None:
    waiting = room(2)
    enter(waiting, ("a", Ticket()), ("b", Ticket()))
    for newcomer in (Ticket(), Ticket(BATCH)):
        assert waiting.enter("c", newcomer, 0.0) == Refused("c", Code.QUEUE_FULL, RETRY_AFTER_S_MAX)
    assert waiting.waiting() == ["a", "b"]


def test_full_queue_evicts_the_newest_of_the_lowest_band() -> None:
    waiting = room(4)
    enter(
        waiting,
        ("default", Ticket()),
        ("batch 1", Ticket(BATCH, deadline=9.0)),
        ("batch 2", Ticket(BATCH, deadline=5.0)),
    )
    waiting.enter_again("batch 0", Ticket(BATCH), 0.0)
    assert waiting.enter("i", Ticket(INTERACTIVE), 0.0) == Refused("batch 2", Code.QUEUE_FULL, RETRY_AFTER_S_MAX)
    assert [waiting.enter(f"d{n}", Ticket(), 0.0) for n in range(2)] == [
        Refused("batch 1", Code.QUEUE_FULL, RETRY_AFTER_S_MAX),
        Refused("d1", Code.QUEUE_FULL, RETRY_AFTER_S_MAX),  # who was admitted before is not sent away
    ]
    assert waiting.waiting() == ["i", "default", "d0", "batch 0"]


def test_queue_of_size_zero_rejects_all_requests() -> None:
    assert room(0).enter("a", Ticket(SYSTEM), 0.0) is not None


def test_request_waits_until_its_deadline_or_the_queue_timeout() -> None:
    waiting = room(timeout_s=10.0)
    enter(waiting, ("none", Ticket()), ("later", Ticket(deadline=11.0)), ("soon", Ticket(BATCH, deadline=3.0)))
    enter(waiting, ("not a number", Ticket(deadline=math.nan)))
    waiting.enter_again("again", Ticket(deadline=12.0), 5.0)
    assert waiting.expire(2.9) == []
    assert waiting.expire(3.0) == ["soon"]
    waiting.timeout_s = 1.0
    assert waiting.expire(10.0) == ["none", "not a number"]
    assert waiting.expire(11.5) == ["later"]
    assert waiting.waiting() == ["again"]
    assert waiting.expire(12.0) == ["again"]
    assert not waiting


def test_a_request_that_lost_its_replica_goes_to_the_front_of_its_band() -> None:
    waiting = room(2)
    enter(waiting, ("a", Ticket(tenant="a", deadline=1.0)), ("i", Ticket(INTERACTIVE)))
    waiting.enter_again("y", Ticket(tenant="y", deadline=8.0), 0.0)
    waiting.enter_again("x", Ticket(tenant="x", deadline=7.0), 0.0)
    assert waiting.waiting() == ["i", "x", "y", "a"]
    waiting.leave("x")
    assert waiting.waiting() == ["i", "y", "a"]


def test_entering_the_queue_twice_is_an_error() -> None:
    waiting = room()
    enter(waiting, ("a", Ticket()))
    with pytest.raises(AssertionError):
        waiting.enter("a", Ticket(), 0.0)


def test_oldest_request_of_a_band_is_promoted_periodically() -> None:
    waiting = room()
    enter(waiting, *((f"b{n}", Ticket(BATCH)) for n in range(3)))
    age_s = AGE_S[BATCH]
    enter(waiting, ("d1", Ticket()), now=age_s)
    waiting.rise(age_s - 1)
    assert waiting.waiting() == ["d1", "b0", "b1", "b2"]
    waiting.rise(age_s)
    assert waiting.waiting() == ["b0", "d1", "b1", "b2"], "it goes before those of the band above"
    waiting.rise(age_s + 1)
    assert waiting.waiting() == ["b0", "d1", "b1", "b2"], "only one"
    enter(waiting, ("i", Ticket(INTERACTIVE)), now=age_s + AGE_S[DEFAULT])
    waiting.rise(age_s + AGE_S[DEFAULT])
    assert waiting.waiting() == ["b0", "i", "d1", "b1", "b2"], "and on, from band to band"
    waiting.rise(2 * age_s)
    assert waiting.waiting() == ["b0", "d1", "i", "b1", "b2"], "each band its own, once in its time"


@given(
    band=st.sampled_from([INTERACTIVE, DEFAULT, BATCH]),
    above=st.sampled_from(list(Band)),
    every_s=st.sampled_from([1, 2, 5]),
)
def test_strict_priority_starves_no_band(band: Band, above: Band, every_s: int) -> None:
    """One goes every so often, others never run out: the oldest of a band goes when it has risen to the top."""
    waiting = room(100, 1e6)
    enter(waiting, ("low", Ticket(band, "low")), *((f"stuck {n}", Ticket(DEFAULT)) for n in range(20)))
    waiting.charge(Ticket(band, "low"), 1e9)
    for now in range(0, int(sum(AGE_S.values())) + 3 * every_s, every_s):
        enter(waiting, (f"flood {now}", Ticket(above)), now=now)
        waiting.rise(now)
        item = next(iter(waiting))
        waiting.leave(item)
        if item == "low":
            return
    raise AssertionError("it still waits")


@given(
    st.lists(
        st.tuples(st.sampled_from(["i", "d", "b", "go"]), st.sampled_from("xyz"), st.integers(1, 9)), max_size=60
    )
)
def test_interactive_order_is_independent_of_lower_bands(steps: list[tuple[str, str, int]]) -> None:
    """The same requests with and without the lower ones, until one of these is old enough to rise."""
    bands = {"i": INTERACTIVE, "d": DEFAULT, "b": BATCH}
    alone, mixed = room(5), room(5)
    tickets = {
        f"{n}": Ticket(bands[what], tenant, work) for n, (what, tenant, work) in enumerate(steps) if what != "go"
    }
    for n, (what, _, _) in enumerate(steps):
        if what == "go":
            for waiting in (alone, mixed):
                if waiting:
                    go(waiting, tickets)
        elif what == "i":
            refusals = [waiting.enter(f"{n}", tickets[f"{n}"], 0.0) for waiting in (alone, mixed)]
            assert (refusals[0] is not None) == (refusals[1] is not None and refusals[1].item == f"{n}")
        else:
            mixed.enter(f"{n}", tickets[f"{n}"], 0.0)
        assert alone.waiting() == [item for item in mixed if tickets[item].band is INTERACTIVE]


def entry(key: tuple[float, int, int], tenant: str) -> Entry[int]:
    return Entry(key, key, tenant=tenant, band=BATCH, front=False, since=0.0)


def test_counters_of_tenants_that_left_are_bounded() -> None:
    queue: BandQueue[int] = BandQueue()
    queue.add(entry((0.0, 0, 0), "waits"))
    queue.charge("waits", 5.0)
    for n in range(3 * TENANTS_MAX):
        queue.serve(f"{n}", 1.0)
    assert len(queue._counters) <= TENANTS_MAX + 1
    queue.add(entry((0.0, 1, 1), "new"))
    assert list(queue) == [0, 1], "who waits keeps its count, and a newcomer has no credit"
    queue.charge("forgotten", 1.0)
    queue.add(entry((0.0, 2, 2), "forgotten"))
    queue.add(entry((0.0, 3, 3), "newer"))
    assert list(queue) == [0, 1, 3, 2]


def test_empty_queue_remembers_the_tenant_served_last() -> None:
    queue: BandQueue[int] = BandQueue()
    queue.serve("last", 100.0)
    for n in range(TENANTS_MAX):
        queue.charge(f"{n}", 1.0)
    queue.add(entry((0.0, 0, 0), "new"))
    queue.add(entry((0.0, 1, 1), f"{TENANTS_MAX - 1}"))
    assert list(queue) == [0, 1]
    queue.charge("new", 2.0)
    assert list(queue) == [1, 0]


@dataclass(frozen=True)
class Attempt:
    band: Band
    since: float
    yields: bool = True


YIELD: dict[str, tuple[list[Attempt], int | None]] = {
    "nobody runs": ([], None),
    "nobody is below": ([Attempt(SYSTEM, 1.0), Attempt(INTERACTIVE, 2.0)], None),
    "the lowest band": ([Attempt(DEFAULT, 9.0), Attempt(BATCH, 1.0), Attempt(DEFAULT, 8.0)], 1),
    "the newest of it": ([Attempt(BATCH, 1.0), Attempt(BATCH, 3.0), Attempt(BATCH, 2.0)], 1),
    "not one that answers": ([Attempt(BATCH, 3.0, False), Attempt(DEFAULT, 2.0)], 1),
    "the first of equals": ([Attempt(BATCH, 1.0), Attempt(BATCH, 1.0)], 0),
}


@pytest.mark.parametrize("case", YIELD)
def test_interactive_request_preempts_the_newest_of_the_lowest_band(case: str) -> None:
    running, index = YIELD[case]
    assert preempt(running, INTERACTIVE) is (None if index is None else running[index])


def test_retry_after_is_queue_length_over_drain_rate() -> None:
    waiting = room()
    enter(waiting, *((f"{n}", Ticket()) for n in range(39)), now=100.0)
    for n in range(40):
        waiting.rate.count(100.0 + n / 5)
    assert waiting.rate.pace_per_s(107.9) == 5.0
    assert waiting.retry_after_s(107.9) == 8
    assert waiting.retry_after_s(108.0 + 20) == RETRY_AFTER_S_MAX  # they have waited long, and nobody was done


def test_retry_after_an_idle_time_uses_the_last_known_rate() -> None:
    waiting = room()
    assert waiting.retry_after_s(1.0) == RETRY_AFTER_S_MAX  # nothing is known
    waiting.timeout_s = 2.5
    assert waiting.retry_after_s(1.0) == 3  # but that everybody in line has left it by then
    waiting.timeout_s = 60.0
    for n in range(40):
        waiting.rate.count(100.0 + n / 20)
    enter(waiting, *((f"{n}", Ticket()) for n in range(39)), now=500.0)
    assert waiting.retry_after_s(500.0) == 2  # as quick as the last time that there was anything to do
    waiting.rate.count(501.0)
    assert waiting.retry_after_s(501.0) == 40  # one a second since then


def test_old_completions_are_forgotten() -> None:
    rate = DrainRate()
    rate.count(3.0)
    assert rate.total(12.9) == 1
    assert rate.total(13.0) == 0
    rate.count(1e9)
    assert rate.total(1e9) == 1


@given(st.lists(st.floats(0, 100), max_size=50), st.integers(0, 2000))
def test_retry_after_is_always_between_one_second_and_a_minute(finished: list[float], waiting: int) -> None:
    rate = DrainRate()
    for at in sorted(finished):
        rate.count(at)
    assert 1 <= rate.retry_after_s(waiting, 100.0) <= RETRY_AFTER_S_MAX
