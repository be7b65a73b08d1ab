"""Limits shared among gateways: unused quota moves, and the sum stays the limit."""

from pathlib import Path

import msgspec
import pytest

from forebay.control.leasing import Leases
from forebay.core.tenancy import Demand, Denied, Lease, Limiter, Quota, Reservation, Tenant, amounts

TEAM = Tenant("team", limits=Quota(requests_per_min=40))
NAMES = ("gateway-0", "gateway-1")


def read(path: Path) -> dict[str, Lease]:
    """What gateways find."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Lease])


def test_unused_quota_moves_to_the_busy_gateway(tmp_path: Path) -> None:
    path = tmp_path / "leases.json"
    leases = Leases(path, {"team": amounts(TEAM.limits)}, NAMES)
    leases.read()
    gateways = {name: Limiter((TEAM,), 2) for name in NAMES}
    passed = 0
    for second in range(30):
        now = 1000.0 + second
        for _ in range(3):  # all traffic reaches one of them
            passed += isinstance(gateways["gateway-0"].reserve("team", 1, False, now), Reservation)
        leases.renew({name: limiter.demand(now) for name, limiter in gateways.items()}, now, 86_400.0 * 9)
        for name, limiter in gateways.items():
            limiter.take(read(path)[name], now)
    assert 20 < passed <= 40


def test_request_over_an_equal_share_is_admitted_and_remaining_quota_is_shared(
    tmp_path: Path,
) -> None:
    path = tmp_path / "leases.json"
    tenant = Tenant("team", limits=Quota(tokens_per_min=400))
    leases = Leases(path, {"team": amounts(tenant.limits)}, NAMES)
    gateways = {name: Limiter((tenant,), 2) for name in NAMES}
    answers: list[Reservation | Denied] = []
    for second in range(5):
        now = 1000.0 + second
        answers += [limiter.reserve("team", 257, False, now) for limiter in gateways.values()]
        reports = {name: msgspec.json.encode(limiter.demand(now)) for name, limiter in gateways.items()}
        leases.renew({name: msgspec.json.decode(each, type=Demand) for name, each in reports.items()}, now, 0.0)
        for name, limiter in gateways.items():
            limiter.take(read(path)[name], now)

    assert [isinstance(answer, Reservation) for answer in answers].index(True) == 4, "in the third second"
    first, last = answers[0], answers[-1]
    assert isinstance(first, Denied)
    assert isinstance(last, Denied)
    assert "share" in first.text
    assert last.text == "Tenant `team` has not enough left of its 400 tokens per minute."


def test_reports_and_leases_of_older_versions_decode() -> None:
    demand = msgspec.json.decode(b'{"at":1.0,"day":2,"tenants":{}}', type=Demand)
    lease = msgspec.json.decode(b'{"asked_at":1.0,"heard_at":1.0,"day":2,"shares":{},"held":{}}', type=Lease)

    assert (demand.refused, lease.left) == ({}, {})


def test_next_control_continues_from_the_granted_leases(tmp_path: Path) -> None:
    path = tmp_path / "leases.json"
    for content in (None, b"{", b"[]"):
        if content is not None:
            path.write_bytes(content)
        leases = Leases(path, {"team": amounts(TEAM.limits)}, NAMES)
        leases.read()
        leases.renew({}, 5.0, 0.0)
        assert set(read(path)) == set(NAMES)
    before = read(path)
    again = Leases(path, {"team": amounts(TEAM.limits)}, NAMES)
    again.read()
    again.renew({}, 6.0, 0.0)
    assert read(path).keys() == before.keys()


def test_unwritable_leases_file_raises_oserror(tmp_path: Path) -> None:
    leases = Leases(tmp_path / "none" / "leases.json", {"team": amounts(TEAM.limits)}, NAMES)
    with pytest.raises(OSError, match="No such file"):
        leases.renew({}, 1.0, 0.0)
