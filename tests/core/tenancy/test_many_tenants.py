"""Limits of thousands of tenants: control divides those of similar ones once."""

from typing import Any

import pytest

from forebay.core.tenancy import Amounts, Lease, Limiter, Quota, Tenant, allot, amounts, leases

NAMES = ("g0", "g1", "g2", "g3")
TENANTS = [Tenant(f"t{n}", limits=Quota(requests_per_min=40, tokens_per_min=4000)) for n in range(300)]
LIMITS = {tenant.name: amounts(tenant.limits) for tenant in TENANTS}


def test_limits_of_idle_tenants_are_divided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    divided: list[Amounts] = []
    divide = leases._divide

    def counted(limit: Amounts, *rest: Any) -> object:
        divided.append(limit)
        return divide(limit, *rest)

    monkeypatch.setattr(leases, "_divide", counted)
    limiters = {name: Limiter(TENANTS, len(NAMES)) for name in NAMES}
    given: dict[str, Lease] = {}
    for second in range(5):
        limiters["g0"].reserve("t7", 100, False, 1000.0 + second)
        demands = {name: limiter.demand(1000.0 + second) for name, limiter in limiters.items()}
        given = allot(LIMITS, demands, given, gateways=NAMES, day=0, now=float(second))
        for name, limiter in limiters.items():
            limiter.take(given[name], 1000.0 + second)
    assert len(divided) <= 2 * 5
    assert {name: lease.shares["t8"].requests for name, lease in given.items()} == dict.fromkeys(NAMES, 10)
    assert given["g0"].left["t7"].requests == 35
    assert given["g0"].left["t8"].requests == 40
