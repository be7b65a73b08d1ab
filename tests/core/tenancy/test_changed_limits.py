"""A tenant's limits change while gateways run, and leases of the old ones are still about."""

import pytest

from forebay.core.tenancy import Amounts, Denied, Lease, Limiter, Quota, Reservation, Tenant, allot, amounts
from forebay.core.tenancy.shares import UNLIMITED

DAY = 9


def limiter(gateways: int = 1, **limits: int) -> Limiter:
    made = Limiter([Tenant("t", limits=Quota(**limits))], gateways)
    made.begin_day(DAY, ends_at=1e6)
    return made


def test_a_lease_of_an_older_limit_neither_exceeds_the_limit_nor_restricts_what_has_none() -> None:
    counts = limiter(4, requests_per_min=8, streams_max=8)
    counts.take(Lease(100.0, 0.0, DAY, {"t": Amounts(500, 10, UNLIMITED, 600)}, {}), 101.0)

    assert counts.demand(101.0).tenants["t"].share == Amounts(8, UNLIMITED, 8, UNLIMITED)


@pytest.mark.parametrize(
    ("limits", "share", "left"),
    [
        ({"requests_per_min": 40, "tokens_per_min": 80}, Amounts(15, 30, UNLIMITED, UNLIMITED), (40, 66)),
        ({"requests_per_min": 10, "tokens_per_min": 20}, Amounts(5, 10, UNLIMITED, UNLIMITED), (10, 20)),
        ({"tokens_per_min": 80, "streams_max": 6}, Amounts(UNLIMITED, 30, 3, UNLIMITED), (UNLIMITED, 66)),
    ],
)
def test_raised_limit_reaches_one_of_several_gateways_only_by_lease(
    limits: dict[str, int], share: Amounts, left: tuple[int, int]
) -> None:
    counts = limiter(2, requests_per_min=20, tokens_per_min=80)
    given = Amounts(15, 30, UNLIMITED, UNLIMITED)
    remains = {"t": Amounts(18, 66, UNLIMITED, UNLIMITED)}
    counts.take(Lease(100.0, 0.0, DAY, {"t": given}, {}, left=remains), 100.0)
    counts.configure([Tenant("t", limits=Quota(**limits)), Tenant("new", limits=Quota(requests_per_min=4))])

    asked = counts.demand(100.0).tenants
    assert asked["t"].share == share
    assert asked["new"].share.requests == 2
    usage = counts._usage["t"]
    assert (usage.left.requests, usage.left.tokens) == left
    counts.take(Lease(101.0, 0.0, DAY, {"t": amounts(Quota(**limits))}, {}), 101.0)
    assert counts.demand(101.0).tenants["t"].share == amounts(Quota(**limits))


def test_single_gateway_gets_all_of_a_changed_limit_at_once() -> None:
    counts = limiter(requests_per_min=1)
    assert isinstance(counts.reserve("t", 1, False, 0.0), Reservation)
    assert isinstance(counts.reserve("t", 1, False, 0.0), Denied)
    counts.configure([Tenant("t", limits=Quota(requests_per_min=2))])
    assert isinstance(counts.reserve("t", 1, False, 0.0), Reservation)
    denied = counts.reserve("t", 1, False, 0.0)
    assert isinstance(denied, Denied)
    assert denied.text == "Tenant `t` has none left of its 2 requests per minute."


@pytest.mark.parametrize("heard", [False, True])
def test_gateway_that_has_not_heard_of_a_first_limit_leaves_the_others_their_part(heard: bool) -> None:
    before = Tenant("t", limits=Quota(requests_per_min=100))
    now_limited = Tenant("t", limits=Quota(requests_per_min=100, streams_max=8, tokens_per_day=10_000))
    names = ("g0", "g1")
    gateways = {name: Limiter([before], 2) for name in names}
    for each in gateways.values():
        each.begin_day(DAY, ends_at=1e6)
    leases: dict[str, Lease] = {}

    def agree(now: float, limit: Quota, *asked: str) -> None:
        demands = {name: gateways[name].demand(now) for name in asked}
        leases.update(allot({"t": amounts(limit)}, demands, leases, gateways=names, day=DAY, now=now))
        for name in asked:
            gateways[name].take(leases[name], now)

    for now in (1.0, 2.0):
        agree(now, before.limits, *names)
    gateways["g0"].configure([now_limited])
    for now in (3.0, 4.0, 400.0):
        agree(now, now_limited.limits, *(names if heard else ("g0",)))
        assert isinstance(gateways["g0"].reserve("t", 500, True, now), Reservation)
        share = leases["g0"].shares["t"]
        assert share.streams >= 4
        assert share.day_tokens >= 5000
        assert sum(lease.held["t"].streams for lease in leases.values()) <= 8
        assert sum(lease.held["t"].day_tokens for lease in leases.values()) <= 10_000
