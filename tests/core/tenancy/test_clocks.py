"""The wall clock is set while a gateway counts the tokens of a day."""

from forebay.core.tenancy import Amounts, Denied, Lease, Limiter, Quota, Tenant

DAY, DAY_S = 9, 86_400.0
LIMIT = 100


def limiter(gateways: int = 1) -> Limiter:
    return Limiter([Tenant("t", limits=Quota(tokens_per_day=LIMIT))], gateways)


def look(counts: Limiter, now: float, ahead_s: float) -> None:
    """Read the wall clock at `now` of the other one; right, it would be the begin of `DAY` at 0."""
    day, gone_s = divmod(now + ahead_s, DAY_S)
    counts.begin_day(DAY + int(day), now + DAY_S - gone_s)


def test_each_day_has_its_tokens_after_a_clock_that_was_hours_ahead_is_corrected() -> None:
    """As at the start of a machine whose hardware clock has local time."""
    counts = limiter()
    look(counts, 72_000.0, 28_800.0)  # 20:00, and it says that it is 04:00 of the next day
    counts.reserve("t", 10, False, 72_000.0)
    look(counts, 72_010.0, 0.0)
    assert not isinstance(counts.reserve("t", 90, False, 72_010.0), Denied)
    denied = counts.reserve("t", 1, False, 72_011.0)
    assert isinstance(denied, Denied), "one day's tokens, whatever the clock said"
    assert denied.retry_after_s == 86_400 - 72_011
    look(counts, DAY_S + 1.0, 0.0)
    assert not isinstance(counts.reserve("t", 100, False, DAY_S + 1.0), Denied)


def test_shares_of_the_day_follow_leases_after_such_a_correction() -> None:
    counts = limiter(gateways=2)
    look(counts, 72_000.0, 28_800.0)
    look(counts, 72_010.0, 0.0)
    counts.take(Lease(72_010.0, 0.0, DAY, {"t": Amounts(1, 1, 1, 80)}, {}), 72_011.0)
    assert counts.demand(72_011.0).day == DAY
    assert not isinstance(counts.reserve("t", 80, False, 72_011.0), Denied)


def test_tokens_after_a_midnight_that_comes_twice_are_those_of_one_day() -> None:
    counts = limiter()
    look(counts, 1000.0, 0.0)
    look(counts, DAY_S + 1.0, 0.0)
    counts.reserve("t", LIMIT, False, DAY_S + 1.0)
    for now in (DAY_S + 10.0, DAY_S + 20.0, DAY_S + 100.0):  # 30 s, then 60 s behind
        look(counts, now, -30.0 if now < DAY_S + 15.0 else -60.0)
        denied = counts.reserve("t", 1, False, now)
        assert isinstance(denied, Denied), now
        assert now + denied.retry_after_s > 2 * DAY_S, "not this midnight but the next"
