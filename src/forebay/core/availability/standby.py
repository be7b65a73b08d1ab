"""Which of a model's replicas serve and which rest: the ones that serve go on, and a ready one steps in at once.

A replica that rests is ready and is told to nobody. There is no memory but what gateways were told last: a control
that comes up again finds the same ones serving.
"""

from collections.abc import Collection, Iterable, Mapping

from forebay.core.model import Replica, ReplicaState
from forebay.core.reconcile import UnitKey


def resting(replicas: Iterable[Replica], active: int, serving: Collection[UnitKey]) -> frozenset[UnitKey]:
    """Those of a model's replicas that rest while `active` are to serve.

    `serving`: the ones that did, by what gateways were told last. They go on serving as long as they are ready; then
    come the others by their id. What is not ready is nobody's stand-in, and is told of as it is.
    """
    ready = [r for r in replicas if r.state is ReplicaState.READY]
    ready.sort(key=lambda r: ((r.id, r.generation) not in serving, r.id, r.generation))
    return frozenset((r.id, r.generation) for r in ready[active:])


def serving(before: Mapping[UnitKey, Replica]) -> frozenset[UnitKey]:
    """The replicas that gateways may send requests to by what they were told."""
    return frozenset(key for key, replica in before.items() if replica.state is ReplicaState.READY)
