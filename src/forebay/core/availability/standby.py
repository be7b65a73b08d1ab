"""Which of a model's replicas serve and which are on standby: serving ones stay, and a ready standby takes over at
once.

A standby replica is ready but not published to gateways; nor is one about to become standby. The only memory is what
was last published: a restarted control finds the same replicas serving.
"""

from collections.abc import Collection, Iterable, Mapping

from forebay.core.model import Replica, ReplicaState
from forebay.core.reconcile import UnitKey


def standby_replicas(replicas: Iterable[Replica], active: int, serving: Collection[UnitKey]) -> frozenset[UnitKey]:
    """The replicas that are on standby while `active` should serve.

    `serving`: those that served, as last published. They keep serving while they are ready; then others follow by id.
    A replica that is not ready is never a standby.
    """
    ready = [r for r in replicas if r.state is ReplicaState.READY]
    ready.sort(key=lambda r: ((r.id, r.generation) not in serving, r.id, r.generation))
    return frozenset((r.id, r.generation) for r in ready[active:])


def future_standbys(replicas: Iterable[Replica], active: int) -> frozenset[UnitKey]:
    """The replicas that will be on standby once they are ready, because `active` others are ready.

    A gateway uses any published replica that reports ready, and may learn of that before control does.
    """
    seen = tuple(replicas)
    if sum(r.state is ReplicaState.READY for r in seen) < active:
        return frozenset()
    return frozenset((r.id, r.generation) for r in seen if r.state in (ReplicaState.STARTING, ReplicaState.WARMING))


def serving(before: Mapping[UnitKey, Replica]) -> frozenset[UnitKey]:
    """The replicas that gateways may send requests to, as last published."""
    return frozenset(key for key, replica in before.items() if replica.state is ReplicaState.READY)
