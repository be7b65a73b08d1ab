"""Which of a model's replicas serve and which rest: the ones that serve go on, and a ready one steps in at once.

A replica that rests is ready and is told to nobody, and neither is one that is about to. There is no memory but what
gateways were told last: a control that comes up again finds the same ones serving.
"""

from collections.abc import Collection, Iterable, Mapping

from forebay.core.model import Replica, ReplicaState
from forebay.core.reconcile import UnitKey


def resting(replicas: Iterable[Replica], active: int, serving: Collection[UnitKey]) -> frozenset[UnitKey]:
    """Those of a model's replicas that rest while `active` are to serve.

    `serving`: the ones that did, by what gateways were told last. They go on serving as long as they are ready; then
    come the others by their id. What is not ready is nobody's stand-in.
    """
    ready = [r for r in replicas if r.state is ReplicaState.READY]
    ready.sort(key=lambda r: ((r.id, r.generation) not in serving, r.id, r.generation))
    return frozenset((r.id, r.generation) for r in ready[active:])


def coming(replicas: Iterable[Replica], active: int) -> frozenset[UnitKey]:
    """Those that will rest as soon as they are ready, since `active` others are.

    A gateway sends requests to whoever says of itself that it is ready, and may hear of that before control does.
    """
    seen = tuple(replicas)
    if sum(r.state is ReplicaState.READY for r in seen) < active:
        return frozenset()
    return frozenset((r.id, r.generation) for r in seen if r.state in (ReplicaState.STARTING, ReplicaState.WARMING))


def serving(before: Mapping[UnitKey, Replica]) -> frozenset[UnitKey]:
    """The replicas that gateways may send requests to by what they were told."""
    return frozenset(key for key, replica in before.items() if replica.state is ReplicaState.READY)
