"""The policy depth leaves out listeners, polling and bytes on the wire: the decisions are the same."""

from itertools import count
from random import Random

import pytest

from forebay.core.model import Policy
from forebay.sim.full.gateway_replay import decisions
from forebay.sim.load.values import Arrival, Workload
from forebay.sim.replay.cluster import SimCluster
from forebay.sim.replay.run import replay

pytestmark = pytest.mark.slow

REQUESTS = 300
TOPICS = 8


def some_load(per_s: float, seed: int) -> Workload:
    """Prompts of some topics, each with an end of its own."""
    rng, at_s, arrivals, ids = Random(seed), 0.01, [], count()
    begins = [[next(ids) for _ in range(5)] for _ in range(TOPICS)]
    for _ in range(REQUESTS):
        at_s += rng.expovariate(per_s)
        known = tuple(rng.choice(begins)[: rng.randint(1, 5)])
        tokens = len(known) * 512 + rng.randrange(1, 512)
        arrivals.append(Arrival(at_s, tokens, rng.randint(1, 60), known))
    return Workload("some", tuple(arrivals))


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize(("per_s", "replicas", "sequences"), [(20.0, 4, 256), (60.0, 3, 4)])
def test_replay_and_full_gateway_choose_the_same_replicas(
    policy: Policy, per_s: float, replicas: int, sequences: int
) -> None:
    workload = some_load(per_s, seed=5)
    cluster = SimCluster(replicas=replicas, sequences_max=sequences)
    outcome = replay(workload, cluster, policy=policy, seed=3)
    chosen = list(outcome.replica)
    assert len(set(chosen)) > 1
    assert decisions(workload, cluster, policy=policy, seed=3) == chosen


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("cluster", [
    SimCluster(replicas=4, gateways=2, sequences_max=8),
    SimCluster(replicas=3, gateways=2, kv_tokens=9 * 1024),  # engines run full, and gateways let requests wait
])  # fmt: skip
def test_replay_and_several_full_gateways_choose_the_same_replicas(policy: Policy, cluster: SimCluster) -> None:
    workload = some_load(40.0, seed=5)
    assert decisions(workload, cluster, policy=policy, seed=3) == list(
        replay(workload, cluster, policy=policy, seed=3).replica
    )
