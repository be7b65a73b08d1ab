"""What a request would take if it came now, by what was learned: each term, and what more of anything does to it."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.model import ReplicaState
from forebay.core.routing import Lengths, Meter, PrefixIndex, Pricing, ReplicaView

PROMPT, OUTPUT = 1000, 1000
SPEED, PACE_S = 8000.0, 0.01


def pricing(gateways: int = 1) -> Pricing:
    found = Pricing(PrefixIndex())
    found.gateways = gateways
    return found


def lengths() -> Lengths:
    found = Lengths()
    found.learn(4 * PROMPT, PROMPT, OUTPUT)
    return found


def view(
    *, speed: float = SPEED, pace_s: float = PACE_S, queued: int = 0, load: int = 0, room: int = 10
) -> ReplicaView:
    """A replica of which this was learned; 0: nothing."""
    seen, meter = ReplicaView(), Meter("chat-0", 1)
    seen.id, seen.generation, seen.state, seen.last_used = "chat-0", 1, ReplicaState.READY, 0
    seen.load, seen.room, seen.meter = load, room, meter
    for _ in range(5):
        if speed:
            meter.learn_prefill(PROMPT, PROMPT / speed)
        if pace_s:
            meter.learn_decode(4, pace_s)
    meter.report(queued, 0.0, 1)
    return seen


def ttft_s(views: Sequence[ReplicaView], waiting: int = 0, *, gateways: int = 1) -> float | None:
    found = pricing(gateways)
    found.refresh([each.meter for each in views], 0.0)
    return found.ttft_s(views, lengths(), waiting, waiting * PROMPT)


def test_latency_is_not_predicted_without_a_known_speed() -> None:
    assert ttft_s([]) is None
    assert ttft_s([view(speed=0.0), view(speed=0.0)], 3) is None
    assert pricing().tpot_s([]) is None
    assert pricing().tpot_s([view(pace_s=0.0)]) is None


def test_predicted_ttft_is_the_mean_prefill_time_of_queued_prompts_and_its_own() -> None:
    assert ttft_s([view()]) == pytest.approx(PROMPT / SPEED)
    assert ttft_s([view(queued=3000)]) == pytest.approx((3000 + PROMPT) / SPEED)
    assert ttft_s([view(queued=3000), view()]) == pytest.approx((1500 + PROMPT) / SPEED)
    assert ttft_s([view(speed=2 * SPEED, queued=3000)]) == pytest.approx((3000 + PROMPT) / SPEED / 2)


def test_replica_of_unknown_speed_is_predicted_with_the_usual_one() -> None:
    assert ttft_s([view(), view(speed=0.0, queued=2000)]) == pytest.approx((1000 + PROMPT) / SPEED)


def test_requests_queued_in_the_gateway_count_before_a_new_one() -> None:
    own_s, stay_s = PROMPT / SPEED, PROMPT / SPEED + OUTPUT * PACE_S

    assert ttft_s([view(room=10)], 20) == pytest.approx(20 * stay_s / 10 + own_s)
    assert ttft_s([view(room=10), view(room=30)], 20) == pytest.approx(20 * stay_s / 40 + own_s)
    assert ttft_s([view(room=10)], 20, gateways=3) == pytest.approx(3 * 20 * stay_s / 10 + own_s)


def test_predicted_ttft_with_free_places_is_the_prefill_time_of_queued_prompts() -> None:
    assert ttft_s([view(room=1000)], 20) == pytest.approx(21 * PROMPT / SPEED)
    assert ttft_s([view(pace_s=0.0)], 20) == pytest.approx(21 * PROMPT / SPEED)


def test_predicted_tpot_is_that_with_one_more_request_within_the_room() -> None:
    def learned(load: int, room: int = 40) -> ReplicaView:
        seen = view(pace_s=0.0, load=load, room=room)
        for running in [*range(1, 33)] * 3:
            seen.meter.learn_decode(running, 0.008 + 0.0004 * running)
        return seen

    assert pricing().tpot_s([learned(0)]) == pytest.approx(0.0084, rel=0.1)
    assert pricing().tpot_s([learned(19)]) == pytest.approx(0.016, rel=0.05)
    assert pricing().tpot_s([learned(500, room=20)]) == pricing().tpot_s([learned(19)])
    both = pricing().tpot_s([learned(0), learned(19), view(pace_s=0.0)])
    assert both == pytest.approx((0.0084 + 0.016) / 2, rel=0.1)


replicas = st.lists(
    st.tuples(st.sampled_from([0.0, 1000.0, SPEED]), st.integers(0, 20_000), st.integers(1, 64)),
    min_size=1,
    max_size=5,
)


@given(replicas, st.integers(0, 100), st.integers(1, 100))
def test_predicted_ttft_grows_with_the_queue(given: list[tuple[float, int, int]], waiting: int, more: int) -> None:
    views = [view(speed=speed, queued=queued, room=room) for speed, queued, room in given]
    now_s, later_s = ttft_s(views, waiting), ttft_s(views, waiting + more)
    for each in views:
        each.meter.report(each.meter.queue_tokens + more, 0.0, 1)
    deeper_s = ttft_s(views, waiting)

    if all(speed == 0.0 for speed, _, _ in given):
        assert (now_s, later_s, deeper_s) == (None, None, None)
    else:
        assert now_s is not None
        assert later_s is not None
        assert deeper_s is not None
        assert 0 < now_s < min(later_s, deeper_s)


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=5), st.integers(0, 100))
def test_another_idle_replica_never_increases_predicted_ttft(queues: list[int], waiting: int) -> None:
    views = [view(queued=queued) for queued in queues]
    alone_s, helped_s = ttft_s(views, waiting), ttft_s([*views, view(speed=0.0)], waiting)

    assert alone_s is not None
    assert helped_s is not None
    assert helped_s <= alone_s + 1e-9
