"""A replica that control calls slow gets less traffic under counting policies, and its full share once recovered."""

from collections import Counter
from dataclasses import dataclass
from random import Random

import pytest
from tests.core.routing.views import choose

from forebay.core.model import Policy, ReplicaState
from forebay.core.routing import Meter, PrefixIndex, Pricing, Route, RoutingRequest


@dataclass
class Seen:
    """A replica that works as fast as its weight says, and is never full."""

    id: str
    meter: Meter
    load: int = 0
    last_used: int = 0
    state: ReplicaState = ReplicaState.READY
    room: int = 1000
    generation: int = 1


def shares(policy: Policy, weight: float, requests: int = 600) -> Counter[str]:
    """How many requests each of three replicas gets while each holds its latest thirty; `c` has the weight."""
    pricing = Pricing(PrefixIndex())
    replicas = [Seen(id, Meter(id, pricing.index.join())) for id in "abc"]
    replicas[2].meter.weigh(weight)
    rng, got, held = Random(1), Counter[str](), list[Seen]()
    for turn in range(requests):
        ask = RoutingRequest(turn, 100, 50.0, key=turn + 1)
        route = choose(policy, replicas, (), rng, request=ask, pricing=pricing)
        assert isinstance(route, Route)
        chosen = replicas[route.at]
        chosen.load, chosen.last_used = chosen.load + 1, turn
        got[chosen.id] += 1
        held.append(chosen)
        if len(held) > 30:
            held.pop(0).load -= 1
    return got


@pytest.mark.parametrize("policy", [Policy.LEAST_REQUESTS, Policy.P2C, Policy.PREFIX_AFFINITY])
def test_counting_policies_send_a_slow_replica_its_share(policy: Policy) -> None:
    even, slow = shares(policy, 1.0), shares(policy, 0.5)
    assert even["c"] == pytest.approx(200, abs=25)
    assert slow["c"] == pytest.approx(120, abs=25)


def test_a_key_stays_with_a_slow_replica_until_that_is_too_loaded() -> None:
    assert 0 < shares(Policy.CONSISTENT_HASH, 0.3)["c"] < shares(Policy.CONSISTENT_HASH, 1.0)["c"]


def test_lower_weight_rescales_learned_speed_and_learning_continues() -> None:
    meter = Meter("a", 1)
    meter.weigh(1.0)
    assert meter.prefill_tokens_per_s == 0.0
    for tokens in (1000, 2000, 3000):
        meter.learn_prefill(tokens, tokens / 1000)
        meter.learn_decode(tokens / 1000, 0.01 + tokens / 1e6)
    fast, slope = meter.prefill_tokens_per_s, meter.decode_slope_s
    meter.weigh(0.5)
    assert (meter.burden, meter.prefill_tokens_per_s, meter.decode_slope_s) == (2.0, fast / 2, slope * 2)
    meter.learn_prefill(2000, 4.0)
    assert meter.prefill_tokens_per_s == pytest.approx(500, rel=0.01)
    meter.weigh(0.5)
    meter.weigh(1.0)
    assert meter.prefill_tokens_per_s == pytest.approx(fast, rel=0.01)
    assert meter.burden == 1.0
