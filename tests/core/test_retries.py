"""The retry budget: a share of the traffic plus a minimum, and no retry storms."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.core.resilience import RetryBudget


def allowed(budget: RetryBudget, now: float, wanted: int = 1000) -> int:
    return sum(budget.allow(now) for _ in range(wanted))


def test_idle_gateway_has_a_minimum_of_retries() -> None:
    budget = RetryBudget()
    assert allowed(budget, 0.0) == 30
    assert allowed(budget, 9.9) == 0
    assert allowed(budget, 10.0) == 30


def test_retry_budget_is_a_share_of_ten_seconds_of_traffic() -> None:
    budget = RetryBudget()
    for n in range(1000):
        budget.request(n / 1000)
    assert allowed(budget, 9.0) == 200 + 30
    assert allowed(budget, 10.0) == 0, "what was spent stays spent"
    assert allowed(budget, 19.0) == 30


def test_budget_without_a_minimum_allows_only_the_share() -> None:
    budget = RetryBudget(0.2, 0.0)
    assert not budget.allow(0.0)
    for n in range(1, 11):
        budget.request(0.0)
        assert allowed(budget, 0.0) == (n % 5 == 0)


STEPS = st.lists(
    st.tuples(st.integers(0, 3000), st.booleans(), st.integers(1, 60)),
    max_size=60,
)


@given(steps=STEPS, share=st.sampled_from([0.0, 0.1, 0.2, 1.0]), floor_per_s=st.sampled_from([0.0, 0.5, 3.0]))
def test_retries_never_exceed_their_share_of_traffic(
    steps: list[tuple[int, bool, int]], share: float, floor_per_s: float
) -> None:
    """Over any stretch of time, retries are within the share of its requests and those just before, and the floor."""
    budget, now = RetryBudget(share, floor_per_s), 0.0
    events: list[tuple[float, int, int]] = []
    for passed_ms, is_request, count in steps:
        now += passed_ms / 1000
        if is_request:
            for _ in range(count):
                budget.request(now)
            events.append((now, count, 0))
        else:
            events.append((now, 0, allowed(budget, now, count)))
    for start, _, _ in events:
        for end in {at for at, _, _ in events if at >= start}:
            requests = sum(count for at, count, _ in events if start - 10 <= at <= end)
            retries = sum(count for at, _, count in events if start <= at <= end)
            assert retries <= share * requests + floor_per_s * (end - start + 11) + 1e-6
