"""Quotas of one gateway: never over its share, settled once, with an accurate Retry-After."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.examples import examples

from forebay.core.errors import Code
from forebay.core.tenancy import LEASE_S, Amounts, Denied, Lease, Limiter, Quota, Reservation, Tenant, amounts
from forebay.core.tenancy.quota import LACK_S
from forebay.core.tenancy.shares import ROUND_S, UNLIMITED, equal_part

NOON = 43_200.0


def limiter(gateways: int = 1, **limits: int) -> Limiter:
    made = Limiter([Tenant("t", limits=Quota(**limits)), Tenant("other")], gateways)
    made.begin_day(9, ends_at=NOON)
    return made


def got(answer: Reservation | Denied) -> Reservation:
    assert isinstance(answer, Reservation), answer
    return answer


def no(answer: Reservation | Denied) -> Denied:
    assert isinstance(answer, Denied)
    return answer


def test_a_tenant_without_limits_is_never_refused() -> None:
    free = limiter()
    for n in range(1000):
        got(free.reserve("other", 1_000_000, True, n / 1000))
    assert free.used(1.0) == {"other": Amounts(1000, 10**9, 1000, 10**9)}


def test_the_remaining_quota_of_a_minute_is_reported() -> None:
    counts = limiter(requests_per_min=3, tokens_per_min=100)
    assert counts.limit("other").requests == counts.limit("other").tokens == UNLIMITED
    assert counts.limit("t")[:2] == (3, 100)
    assert counts.minute("t", 5.0) == (3, 0, 100, 0)

    one = got(counts.reserve("t", 30, False, 5.5))
    got(counts.reserve("t", 50, False, 25.5))
    assert counts.minute("t", 25.5) == (1, 61, 20, 61)  # the second that it came in, and 60 more
    counts.settle(one, 10, 26.0)
    assert counts.minute("t", 30.0) == (1, 56, 40, 56)
    assert counts.minute("t", 66.0) == (2, 20, 50, 20)
    assert counts.minute("t", 200.0) == (3, 0, 100, 0)


def test_demand_report_says_since_when_requests_are_refused() -> None:
    counts = limiter(gateways=2, tokens_per_min=100)
    no(counts.reserve("t", 60, False, 2.0))
    no(counts.reserve("t", 70, False, 5.0))
    assert counts.demand(6.0).lacking_s == {"t": 4}
    no(counts.reserve("t", 70, False, 20.0))
    assert counts.demand(20.0 + LACK_S).lacking_s == {"t": 48}
    assert counts.demand(21.0 + LACK_S).lacking_s == {}
    no(counts.reserve("t", 60, False, 60.0))
    assert counts.demand(61.0).lacking_s == {"t": 1}


def test_remaining_quota_of_one_of_two_gateways_is_its_share() -> None:
    counts = limiter(gateways=2, requests_per_min=10)
    assert counts.minute("t", 5.0)[:2] == (5, 0)
    counts.take(Lease(5.0, 5.0, 9, {"t": Amounts(7, UNLIMITED, UNLIMITED, UNLIMITED)}, {}), 5.0)
    assert counts.minute("t", 5.0)[:2] == (7, 0)
    for _ in range(6):
        got(counts.reserve("t", 0, False, 6.0))
    counts.take(Lease(6.0, 6.0, 9, {"t": Amounts(2, UNLIMITED, UNLIMITED, UNLIMITED)}, {}), 6.0)
    assert counts.minute("t", 6.0)[:2] == (0, 61)


def test_a_late_settlement_never_reports_more_than_the_remaining_quota() -> None:
    counts = limiter(tokens_per_min=100)
    late = got(counts.reserve("t", 90, False, 5.0))
    counts.settle(late, 150, 100.0)
    assert counts.minute("t", 100.0)[2:] == (40, 61)


@pytest.mark.parametrize(
    ("limits", "code", "retry_after_s", "says"),
    [
        ({"requests_per_min": 2}, Code.RATE_LIMITED, 60, "2 requests per minute"),
        ({"tokens_per_min": 25}, Code.RATE_LIMITED, 60, "25 tokens per minute"),
        ({"tokens_per_day": 25}, Code.BUDGET_EXCEEDED, 43_190, "25 tokens per day"),
        ({"streams_max": 2}, Code.STREAMS_LIMIT, 1, "2 streams"),
        ({"requests_per_min": 2, "tokens_per_day": 25}, Code.BUDGET_EXCEEDED, 43_190, "per day"),
    ],
)
def test_request_over_a_limit_is_refused_with_code_and_retry_after(
    limits: dict[str, int], code: Code, retry_after_s: int, says: str
) -> None:
    counts = limiter(**limits)
    got(counts.reserve("t", 10, True, 9.5))
    got(counts.reserve("t", 10, True, 9.75))
    refused = no(counts.reserve("t", 10, True, 10.0))

    assert (refused.code, refused.retry_after_s) == (code, retry_after_s)
    assert "`t`" in refused.text
    assert says in refused.text


@pytest.mark.parametrize(
    ("limits", "code"),
    [({"tokens_per_min": 25}, Code.RATE_LIMITED), ({"tokens_per_day": 25}, Code.BUDGET_EXCEEDED)],
)
def test_request_over_the_limit_has_no_retry_after(limits: dict[str, int], code: Code) -> None:
    refused = no(limiter(**limits).reserve("t", 26, False, 0.0))

    assert (refused.code, refused.retry_after_s) == (code, 0)
    assert "26 tokens" in refused.text


def test_only_streams_count_as_streams() -> None:
    counts = limiter(streams_max=1)
    got(counts.reserve("t", 1, True, 0.0))
    got(counts.reserve("t", 1, False, 0.0))
    no(counts.reserve("t", 1, True, 0.0))


def test_retry_after_of_the_stream_limit_follows_from_recent_stream_ends() -> None:
    counts = limiter(streams_max=2)
    for _ in range(10):
        counts.settle(got(counts.reserve("t", 1, True, 5.0)), 1, 5.0)
    got(counts.reserve("t", 1, True, 6.0))
    got(counts.reserve("t", 1, True, 6.0))

    assert no(counts.reserve("t", 1, True, 6.0)).retry_after_s == 1
    assert no(counts.reserve("t", 1, True, 36.0)).retry_after_s == 3  # ten in thirty seconds
    assert no(counts.reserve("t", 1, True, 86.0)).retry_after_s == 60  # none for a minute


def test_retry_after_of_the_stream_limit_is_the_age_of_the_streams() -> None:
    counts = limiter(streams_max=1)
    got(counts.reserve("t", 1, True, 100.0))
    assert [no(counts.reserve("t", 1, True, 100.0 + s)).retry_after_s for s in (0, 2, 20, 500)] == [1, 2, 20, 60]


def test_a_reservation_is_settled_once() -> None:
    counts = limiter(streams_max=1)
    reservation = got(counts.reserve("t", 10, True, 0.0))
    counts.settle(reservation, 5, 1.0)
    with pytest.raises(AssertionError, match="once"):
        counts.settle(reservation, 5, 1.0)


def test_settling_refunds_unused_tokens_and_charges_excess() -> None:
    counts = limiter(tokens_per_min=100, tokens_per_day=1000)
    first = got(counts.reserve("t", 100, False, 0.0))
    no(counts.reserve("t", 1, False, 1.0))
    counts.settle(first, 30, 2.0)
    second = got(counts.reserve("t", 70, False, 3.0))
    assert counts.used(3.0)["t"] == Amounts(2, 100, 0, 100)
    counts.settle(second, 90, 10.0)
    assert counts.used(10.0)["t"] == Amounts(2, 120, 0, 120)
    no(counts.reserve("t", 1, False, 10.0))
    counts.settle(got(counts.reserve("t", 0, False, 10.0)), 0, 10.0)  # what needs no tokens lacks none
    assert counts.used(64.0)["t"] == Amounts(1, 20, 0, 120), "the excess counts from when it was known"
    assert counts.used(71.0)["t"] == Amounts(0, 0, 0, 120)


def test_refund_after_the_minute_changes_only_the_daily_usage() -> None:
    counts = limiter(tokens_per_min=100, tokens_per_day=1000)
    old = got(counts.reserve("t", 60, False, 0.0))
    got(counts.reserve("t", 50, False, 61.0))
    counts.settle(old, 10, 62.0)

    assert counts.used(62.0)["t"] == Amounts(1, 50, 0, 60)


def test_new_day_begins_unused_and_running_requests_count_for_the_old_one() -> None:
    counts = limiter(tokens_per_day=100)
    over_midnight = got(counts.reserve("t", 100, False, 0.0))
    counts.begin_day(9, ends_at=NOON)
    no(counts.reserve("t", 1, False, 1.0))
    counts.begin_day(10, ends_at=NOON + 86_400)
    counts.settle(over_midnight, 40, 2.0)

    got(counts.reserve("t", 100, False, 3.0))
    assert counts.day == 10


def test_restart_restores_usage_except_streams() -> None:
    before = limiter(tokens_per_min=100, tokens_per_day=500, streams_max=1)
    got(before.reserve("t", 80, True, 100.0))
    kept = before.used(100.5)

    after = limiter(tokens_per_min=100, tokens_per_day=500, streams_max=1)
    after.restore({**kept, "gone": Amounts(1, 1, 1, 1)}, 9, age_s=30.0, now=5.0)
    no(after.reserve("t", 21, True, 5.0))
    assert after.used(5.0) == {"t": Amounts(1, 80, 0, 80)}
    assert after.used(36.0) == {"t": Amounts(0, 0, 0, 80)}

    later = limiter(tokens_per_min=100, tokens_per_day=500)
    later.restore(kept, 8, age_s=61.0, now=5.0)
    assert later.used(5.0) == {}


def test_amended_usage_counts_like_own() -> None:
    counts = limiter(tokens_per_day=100, requests_per_min=4)
    got(counts.reserve("t", 90, False, 5.0))
    counts.amend({"t": Amounts(-3, -60, 0, -60), "gone": Amounts(9, 9, 9, 9)}, 5.0)
    got(counts.reserve("t", 70, False, 5.0))
    no(counts.reserve("t", 1, False, 5.0))
    counts.amend({"t": Amounts(2, 7, 0, -200)}, 6.0)
    assert counts.used(6.0)["t"] == Amounts(4, 167, 0, 0)
    assert counts.used(66.0)["t"] == Amounts(2, 7, 0, 0)


def test_streams_of_a_draining_process_count_at_its_successor() -> None:
    counts = limiter(streams_max=3)
    counts.inherit({"t": 2, "gone": 9}, 100.0)
    own = got(counts.reserve("t", 1, True, 110.0))
    assert no(counts.reserve("t", 1, True, 110.0)).retry_after_s == 10
    assert counts.demand(110.0).tenants["t"].used.streams == 3
    assert counts.used(110.0)["t"].streams == 1, "the others are not to be inherited twice"
    counts.inherit({"t": 1}, 112.0)
    got(counts.reserve("t", 1, True, 112.0))
    assert no(counts.reserve("t", 1, True, 113.0)).retry_after_s == 13
    counts.settle(own, 1, 113.0)
    counts.inherit({}, 113.0)
    counts.inherit({}, 114.0)
    assert counts.demand(114.0).tenants["t"].used.streams == 1


# --- shares


def lease(share: Amounts, asked_at: float, day: int = 9) -> Lease:
    return Lease(asked_at, 0.0, day, {"t": share, "unknown": share}, {})


def test_one_of_several_gateways_begins_with_an_equal_share() -> None:
    counts = limiter(4, requests_per_min=8, streams_max=7)

    assert counts.demand(0.0).tenants["t"].share == Amounts(2, UNLIMITED, 1, UNLIMITED)
    assert equal_part(amounts(Quota(tokens_per_day=9)), 1).day_tokens == 9


def test_expired_lease_leaves_at_most_an_equal_share_per_minute() -> None:
    counts = limiter(4, requests_per_min=8, tokens_per_min=80, streams_max=8, tokens_per_day=800)
    counts.take(lease(Amounts(5, 10, 7, 600), asked_at=100.0), 101.0)
    assert counts.demand(109.9).tenants["t"].share == Amounts(5, 10, 7, 600)
    for _ in range(2):
        got(counts.reserve("t", 1, False, 110.0))
    no(counts.reserve("t", 1, False, 110.0))
    assert counts.demand(110.0).tenants["t"].share == Amounts(2, 10, 7, 600)


@pytest.mark.parametrize("asked_at", [90.0, 500.0])
def test_expired_or_foreign_lease_grants_at_most_an_equal_share(asked_at: float) -> None:
    counts = limiter(4, requests_per_min=8)
    counts.take(lease(Amounts(5, UNLIMITED, UNLIMITED, UNLIMITED), asked_at), 100.0)

    assert counts.demand(100.0).tenants["t"].share.requests == 2


def test_daily_share_applies_only_to_its_day() -> None:
    counts = limiter(4, tokens_per_day=800)
    counts.take(lease(Amounts(UNLIMITED, UNLIMITED, UNLIMITED, 600), 0.0, day=10), 0.0)
    assert counts.demand(0.0).tenants["t"].share.day_tokens == 200
    counts.take(lease(Amounts(UNLIMITED, UNLIMITED, UNLIMITED, 600), 0.0, day=9), 0.0)
    assert counts.demand(0.0).tenants["t"].share.day_tokens == 600
    counts.begin_day(10, NOON)
    assert counts.demand(0.0).tenants["t"].share.day_tokens == 200


def test_request_exceeding_the_share_may_be_retried_soon() -> None:
    counts = limiter(4, tokens_per_min=80)
    refused = no(counts.reserve("t", 50, False, 3.0))

    assert (refused.code, refused.retry_after_s) == (Code.RATE_LIMITED, ROUND_S)
    assert refused.text.startswith(
        "This gateway has not enough left of its share of the 80 tokens per minute of tenant"
    )
    assert refused.text.endswith("Please try again.")


LIMITS = {"requests_per_min": 8, "tokens_per_min": 80, "streams_max": 8, "tokens_per_day": 160}


@pytest.mark.parametrize(
    ("kind", "share", "code", "used_up", "own_s"),
    [
        ("requests", 2, Code.RATE_LIMITED, Code.RATE_LIMITED, 60),
        ("tokens", 25, Code.RATE_LIMITED, Code.RATE_LIMITED, 60),
        ("tokens", 5, Code.RATE_LIMITED, Code.RATE_LIMITED, int(LEASE_S)),
        ("streams", 2, Code.STREAMS_LIMIT, Code.STREAMS_LIMIT, 1),
        ("day_tokens", 25, Code.RATE_LIMITED, Code.BUDGET_EXCEEDED, 43_190),
    ],
)
def test_retry_after_of_a_used_up_share_is_short_only_while_the_tenant_has_more(
    kind: str, share: int, code: Code, used_up: Code, own_s: int
) -> None:
    limit = amounts(Quota(**LIMITS))

    def answer(left: int, now: float = 10.0) -> Denied:
        counts = limiter(2, **LIMITS)
        for _ in range(2):
            counts.reserve("t", 10, True, 9.5)
        lent, rest = limit._replace(**{kind: share}), limit._replace(**{kind: left})
        counts.take(Lease(9.0, 0.0, 9, {"t": lent}, {}, {"t": rest}), 9.75)
        return no(counts.reserve("t", 10, True, now))

    more, none, alone = answer(10), answer(0), answer(0, now=9.0 + LEASE_S)
    assert (more.code, more.retry_after_s) == (code, min(ROUND_S, own_s))
    assert "share" in more.text
    assert (none.code, none.retry_after_s) == (used_up, own_s)
    assert none.text.startswith("Tenant `t` has")
    assert alone.code == used_up
    assert alone.retry_after_s > ROUND_S
    assert "cannot reach control" in alone.text


def test_usage_since_the_lease_reduces_the_remaining_quota() -> None:
    counts = limiter(2, tokens_per_min=80)
    none = Amounts(*[UNLIMITED] * 4)
    counts.take(Lease(9.0, 0.0, 9, {"t": none._replace(tokens=70)}, {}, {"t": none._replace(tokens=80)}), 9.0)
    got(counts.reserve("t", 65, False, 9.5))

    assert no(counts.reserve("t", 15, False, 9.75)).retry_after_s == ROUND_S
    assert no(counts.reserve("t", 16, False, 9.75)).retry_after_s == 61
    assert no(counts.reserve("t", 16, False, 10.0)).retry_after_s == 60


def test_remaining_daily_quota_applies_only_to_its_day() -> None:
    counts = limiter(2, tokens_per_day=80)
    none = Amounts(*[UNLIMITED] * 4)
    share, left = none._replace(day_tokens=10), none._replace(day_tokens=0)
    counts.take(Lease(9.0, 0.0, 9, {"t": share}, {}, {"t": left}), 9.0)
    assert no(counts.reserve("t", 50, False, 9.0)).retry_after_s == NOON - 9
    counts.begin_day(10, NOON)
    assert no(counts.reserve("t", 50, False, 10.0)).retry_after_s == ROUND_S
    counts.take(Lease(9.0, 0.0, 9, {"t": share}, {}, {"t": left}), 10.0)
    assert no(counts.reserve("t", 50, False, 10.0)).retry_after_s == ROUND_S


def test_demand_report_includes_the_largest_rejected_request_while_retries_are_likely() -> None:
    counts = limiter(2, tokens_per_min=80)

    def refused(now: float) -> Amounts | None:
        return counts.demand(now).refused.get("t")

    assert refused(0.0) is None
    no(counts.reserve("t", 41, True, 1.0))
    no(counts.reserve("t", 60, False, 2.0))
    no(counts.reserve("t", 50, True, 3.0))
    assert refused(3.0) == Amounts(1, 60, 0, 60)
    got(counts.reserve("t", 1, False, 4.0))
    assert refused(2.0 + LACK_S) == Amounts(1, 60, 0, 60)
    assert refused(3.0 + LACK_S) is None, "nobody has come again for it"
    no(counts.reserve("t", 50, True, 34.0))
    assert refused(34.0) == Amounts(1, 50, 1, 50)
    counts.take(lease(Amounts(UNLIMITED, 70, UNLIMITED, UNLIMITED), 34.0), 34.0)
    got(counts.reserve("t", 50, True, 35.0))
    assert refused(35.0) is None


def test_demand_report_includes_rejected_demand_for_a_minute() -> None:
    counts = limiter(requests_per_min=2, tokens_per_min=100, streams_max=1, tokens_per_day=1000)
    got(counts.reserve("t", 60, True, 1.0))
    no(counts.reserve("t", 50, True, 2.0))
    report = counts.demand(3.0)

    assert (report.at, report.day, list(report.tenants)) == (3.0, 9, ["t"])
    assert report.tenants["t"].used == Amounts(1, 60, 1, 60)
    assert report.tenants["t"].wanted == Amounts(2, 110, 2, 170)
    assert counts.demand(90.0).tenants["t"].wanted == Amounts(0, 0, 1, 60)


# --- properties

times = st.integers(0, 400).map(lambda eighths: eighths / 8)


@settings(max_examples=examples(200))
@given(
    st.lists(st.tuples(times, st.integers(1, 40)), max_size=30),
    st.integers(1, 6),
    st.integers(40, 90),
    st.integers(1, 40),
)
def test_a_retry_is_admitted_after_retry_after_and_not_a_second_earlier(
    requests: list[tuple[float, int]], requests_per_min: int, tokens_per_min: int, tokens: int
) -> None:
    counts = limiter(requests_per_min=requests_per_min, tokens_per_min=tokens_per_min)
    now = 0.0
    for gap, amount in requests:
        now += gap
        counts.reserve("t", amount, False, now)
    answer = counts.reserve("t", tokens, False, now)
    if isinstance(answer, Denied):
        no(counts.reserve("t", tokens, False, now + answer.retry_after_s - 1))
        got(counts.reserve("t", tokens, False, now + answer.retry_after_s))


class Counts(RuleBasedStateMachine):
    """The limiter against a plain list of what was let in. Answers use at most their estimate."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.day = 1
        self.open: list[tuple[list[float], bool, Reservation]] = []
        self.seen: list[list[float]] = []
        """When, tokens, day."""
        self.ends: deque[float] = deque()

    @initialize(
        requests=st.integers(1, 8), tokens=st.integers(1, 60), streams=st.integers(1, 4), day=st.integers(1, 200)
    )
    def begin(self, requests: int, tokens: int, streams: int, day: int) -> None:
        self.limit = Amounts(requests, tokens, streams, day)
        self.counts = Limiter([Tenant("t", limits=Quota(*self.limit))])
        self.counts.begin_day(self.day, NOON)

    def used(self) -> Amounts:
        minute = [(tokens, 1) for at, tokens, _ in self.seen if int(at) > int(self.now) - 61]
        return Amounts(
            len(minute),
            int(sum(tokens for tokens, _ in minute)),
            sum(stream for _, stream, _ in self.open),
            int(sum(tokens for _, tokens, day in self.seen if day == self.day)),
        )

    @rule(tokens=st.integers(0, 50), stream=st.booleans())
    def ask(self, tokens: int, stream: bool) -> None:
        used = self.used()
        fits = (
            used.requests + 1 <= self.limit.requests
            and used.tokens + tokens <= self.limit.tokens
            and used.day_tokens + tokens <= self.limit.day_tokens
            and (not stream or used.streams + 1 <= self.limit.streams)
        )
        answer = self.counts.reserve("t", tokens, stream, self.now)
        assert isinstance(answer, Reservation) == fits
        if isinstance(answer, Reservation):
            entry = [self.now, tokens, self.day]
            self.seen.append(entry)
            self.open.append((entry, stream, answer))
        else:
            assert answer.code in (Code.RATE_LIMITED, Code.BUDGET_EXCEEDED, Code.STREAMS_LIMIT)
            assert answer.text

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        entry, _, reservation = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        entry[1] = data.draw(st.integers(0, int(entry[1])))
        self.counts.settle(reservation, int(entry[1]), self.now)

    @rule(passed=st.floats(0, 70))
    def time_passes(self, passed: float) -> None:
        self.now += passed

    @rule()
    def midnight(self) -> None:
        self.day += 1
        self.counts.begin_day(self.day, NOON)

    @invariant()
    def counts_are_right(self) -> None:
        used = self.counts.used(self.now)
        assert used.get("t", Amounts(0, 0, 0, 0)) == self.used()

    @invariant()
    def no_sixty_seconds_hold_more_than_the_limit(self) -> None:
        recent = [tokens for at, tokens, _ in self.seen if at > self.now - 60]
        assert len(recent) <= self.limit.requests
        assert sum(recent) <= self.limit.tokens

    def teardown(self) -> None:
        for entry, _, reservation in self.open:
            self.counts.settle(reservation, int(entry[1]), self.now)
        self.open = []
        if hasattr(self, "counts"):
            assert self.counts.demand(self.now).tenants["t"].used.streams == 0


TestCounts = Counts.TestCase


def test_a_clock_set_back_over_midnight_does_not_give_the_days_tokens_again() -> None:
    counts = limiter(tokens_per_day=100)
    counts.begin_day(10, ends_at=NOON)
    got(counts.reserve("t", 100, False, 0.0))
    for day in (9, 10):
        counts.begin_day(day, ends_at=NOON + 20.0 + (day - 10) * 86_400)
        assert no(counts.reserve("t", 1, False, 1.0)).code is Code.BUDGET_EXCEEDED
    counts.begin_day(2, ends_at=NOON)  # it was wrong by more than a moment: then the new word counts
    got(counts.reserve("t", 100, False, 2.0))
