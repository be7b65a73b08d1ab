"""The arithmetic of spares: known figures, Monte Carlo simulation, and invariants for any figures."""

from math import isclose
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.availability.measured import (
    PRIOR_MTBF_S,
    PRIOR_MTTR_S,
    LifetimeSums,
    failure_times,
    mtbf_at_least_s,
)
from forebay.core.availability.spares import (
    SPARES_MAX,
    FailureTimes,
    enough_share,
    estimate_availability,
    spares_needed,
)

HOUR_S = 3600.0
HALF_A_YEAR_S = 182.5 * 86_400
BIG = FailureTimes(HALF_A_YEAR_S, 4 * HOUR_S, parts=8)


@pytest.mark.parametrize(
    ("needed", "mttr_s", "spares"),
    [(8, 4 * HOUR_S, 2), (32, 4 * HOUR_S, 3), (8, 900.0, 1)],
)
def test_groups_of_eight_gpus_need_more_than_one_spare_unless_repaired_quickly(
    needed: int, mttr_s: float, spares: int
) -> None:
    up = FailureTimes(HALF_A_YEAR_S, mttr_s, parts=8).replica_up
    assert spares_needed(needed, up, 0.999) == spares


@given(st.integers(1, 200), st.floats(0.5, 0.99999), st.floats(0.5, 0.9999))
def test_smallest_sufficient_number_of_spares_is_found(needed: int, up: float, target: float) -> None:
    spares = spares_needed(needed, up, target)
    if spares is None:
        assert 1 - enough_share(needed, SPARES_MAX, up) > 1 - target
        return
    assert 1 - enough_share(needed, spares, up) <= 1 - target
    assert not spares or 1 - enough_share(needed, spares - 1, up) > 1 - target
    had = spares + 3
    again = spares_needed(needed, up, target, had)
    assert again is None or again >= spares


def test_number_of_spares_has_hysteresis() -> None:
    needed, target = 8, 0.999
    just_enough = next(up for i in range(10_000) if spares_needed(needed, up := 0.97 + i / 1e6, target) == 2)
    assert spares_needed(needed, just_enough, target, had=3) == 3
    assert spares_needed(needed, just_enough, target, had=2) == 2


def test_simulated_availability_matches_the_calculation() -> None:
    rng, failing = Random(5), FailureTimes(50.0, 5.0)
    needed, spares, switch_s, seconds = 4, 2, 0.5, 60_000.0
    reckoned = estimate_availability(needed, spares, failing, switch_s)
    short = _short_of_time(rng, failing, (needed, spares), seconds)

    assert isclose(short / seconds, 1 - reckoned.enough, rel_tol=0.15)
    assert isclose(reckoned.switching, needed * switch_s / failing.mtbf_s)
    assert reckoned.full == reckoned.enough - reckoned.switching
    assert reckoned.any > reckoned.enough


def _short_of_time(rng: Random, failing: FailureTimes, fleet: tuple[int, int], seconds: float) -> float:
    """For how long fewer than are needed were up: replicas that fail and are repaired, each by itself."""
    needed, spares = fleet
    up = [True] * (needed + spares)
    ends = [rng.expovariate(1 / failing.mtbf_s) for _ in up]
    now = short = 0.0
    while now < seconds:
        who = min(range(len(ends)), key=ends.__getitem__)
        short += (ends[who] - now) * (sum(up) < needed)
        now, up[who] = ends[who], not up[who]
        ends[who] += rng.expovariate(1 / (failing.mtbf_s if up[who] else failing.mttr_s))
    return short


def test_availability_of_zero_replicas_and_of_always_or_never_available_ones() -> None:
    assert enough_share(3, 0, 1.0) == enough_share(0, 0, 0.3) == 1.0
    assert enough_share(3, 5, 0.0) == 0.0
    assert spares_needed(100, 0.2, 0.999) is None
    nothing = estimate_availability(0, 0, BIG, 1.0)
    assert (nothing.any, nothing.enough, nothing.switching) == (0.0, 1.0, 0.0)
    hopeless = estimate_availability(50, 1, FailureTimes(1.0, 1.0), 10.0)
    assert (hopeless.switching, hopeless.full) == (1.0, 0.0)


def test_prior_is_replaced_by_observations() -> None:
    assert failure_times(LifetimeSums()) == FailureTimes(PRIOR_MTBF_S, PRIOR_MTTR_S)
    year = LifetimeSums(replica_s=365 * 86_400.0, failures=99, repairs=99, repair_s=99 * 60.0)
    both = failure_times(year + LifetimeSums(promotions=1, promotion_s=0.2))
    assert isclose(both.mtbf_s, 395 * 86_400 / 100)
    assert isclose(both.mttr_s, (900 + 99 * 60) / 100)


@pytest.mark.parametrize(("failures", "at_most"), [(0, 2.996), (1, 4.744), (3, 7.754), (10, 16.96)])
def test_mtbf_lower_bound_equals_published_tables_and_the_rule_of_three(failures: int, at_most: float) -> None:
    assert isclose(mtbf_at_least_s(LifetimeSums(1000.0, failures)), 1000 / at_most, rel_tol=1e-3)
