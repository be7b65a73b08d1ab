"""Leases of leaders and replicas: a holder stops before the lease can be given to another one."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.core.leading.lease import DRIFT_MAX, LOOKS, RENEWALS, ReplicaLease, expired_text, usable_until
from forebay.core.leading.settings import control_conflicts


@given(
    asked_at=st.floats(0, 1e6),
    way_s=st.floats(0, 60),
    lease_s=st.floats(2, 300),
    rate=st.floats(1 - DRIFT_MAX, 1.5),
)
def test_holder_with_bounded_clock_drift_stops_before_the_lease_ends(
    asked_at: float, way_s: float, lease_s: float, rate: float
) -> None:
    ends_at = asked_at + way_s + lease_s  # the lender writes the time down after it was asked
    stops_at = asked_at + (usable_until(0.0, lease_s)) / rate
    assert stops_at <= ends_at + 1e-6


def test_two_renewals_may_fail_before_a_leader_pauses() -> None:
    lease_s = 8.0
    assert usable_until(0.0, lease_s) > 3 * lease_s / RENEWALS
    assert lease_s / LOOKS <= 1.0


def test_polled_replica_continues_and_unpolled_one_stops_in_time() -> None:
    lease = ReplicaLease(asked_at=10.0, lease_s=30.0)
    assert not lease.ended(39.9)
    assert lease.look_again_s(20.0) == 20.0
    assert lease.ended(40.0)
    assert lease.look_again_s(50.0) == 0.0
    assert "30 s" in expired_text(30.0)


def test_several_controllers_require_a_shared_store() -> None:
    several = {"control": {"controllers": "several"}}
    for store in (None, "sqlite:///x.db"):
        [conflict] = control_conflicts({**several, "store": store})
        assert conflict.path == "store"
        assert "postgresql" in conflict.allowed
    for fine in ({}, {"control": []}, {"control": {"controllers": "one"}}, {**several, "store": "postgresql://h/n"}):
        assert list(control_conflicts(fine)) == []
