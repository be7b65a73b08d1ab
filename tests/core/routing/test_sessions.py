"""Session homes, on which several gateways agree without communication."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from forebay.core.model import ReplicaState
from forebay.core.routing.meter import Meter
from forebay.core.routing.policies import home
from forebay.core.routing.sessions import HOMES_MAX, LOSSES_MAX, SLOTS_MAX, SessionHomes
from forebay.core.routing.values import ReplicaView

READY, DEGRADED, DRAINING = ReplicaState.READY, ReplicaState.DEGRADED, ReplicaState.DRAINING
KEYS = range(1, 41)


def seen(id: str) -> ReplicaView:
    """A start of the slot."""
    view = ReplicaView()
    view.id, view.state, view.meter = id, READY, Meter(id, 1)
    return view


class Gateway:
    """What a gateway does with it: look, find, send, settle."""

    def __init__(self) -> None:
        self.homes = SessionHomes()

    def look(self, replicas: list[ReplicaView]) -> None:
        self.homes.detect_losses(replicas)

    def send(self, key: int, replicas: list[ReplicaView]) -> str:
        self.look(replicas)
        live = [at for at, each in enumerate(replicas) if each.state is READY or each.state is DEGRADED]
        found = self.homes.find(key)
        at = next((at for at in live if replicas[at].id == found), -1)
        slot = str(replicas[at if at >= 0 else home(replicas, live, key)].id)
        self.homes.settle(key, slot)
        return slot


def test_a_session_stays_when_others_come_and_moves_once_when_its_replica_is_lost() -> None:
    gateway, replicas = Gateway(), [seen(name) for name in "abc"]
    began = {key: gateway.send(key, replicas) for key in KEYS}
    assert len(set(began.values())) == 3
    more = [*replicas, *(seen(name) for name in "defg")]
    assert {key: gateway.send(key, more) for key in KEYS} == began
    more[0].state = DEGRADED
    assert {key: gateway.send(key, more) for key in KEYS} == began
    more[0].state = DRAINING
    moved = {key: gateway.send(key, more) for key in KEYS}
    assert {key for key in KEYS if moved[key] != began[key]} == {key for key in KEYS if began[key] == "a"}
    assert "a" not in moved.values()
    again = [seen("a"), *more[1:]]
    assert {key: gateway.send(key, again) for key in KEYS} == moved


@given(st.lists(st.sampled_from("abcd"), max_size=12), st.data())
def test_gateways_that_see_the_same_losses_agree(lost: list[str], data: st.DataObject) -> None:
    replicas = {name: seen(name) for name in "abcd"}
    gateways = [Gateway(), Gateway()]
    for key in KEYS:
        for gateway in gateways:
            gateway.send(key, list(replicas.values()))
    for name in lost:
        replicas[name].state = DRAINING
        for gateway in gateways:
            gateway.look(list(replicas.values()))
            for key in data.draw(st.lists(st.sampled_from(KEYS), max_size=5)):
                gateway.send(key, list(replicas.values()))
        replicas[name] = seen(name)
        for gateway in gateways:
            gateway.look(list(replicas.values()))
    one, other = ({key: gateway.send(key, list(replicas.values())) for key in KEYS} for gateway in gateways)
    apart = [key for key in KEYS if one[key] != other[key]]
    assert not apart


def test_restart_between_two_snapshots_is_a_loss() -> None:
    gateway, replicas = Gateway(), [seen(name) for name in "abc"]
    began = {key: gateway.send(key, replicas) for key in KEYS}
    replicas = [seen("a"), *replicas[1:]]
    moved = {key: gateway.send(key, replicas) for key in KEYS}
    assert "a" not in moved.values()
    assert gateway.homes.lost("a") == 1
    assert gateway.homes.lost("b") == 0
    assert Counter(began.values())["a"] > 0


def test_sessions_keep_their_homes_where_all_are_lost_at_once() -> None:
    gateway, replicas = Gateway(), [seen(name) for name in "abc"]
    began = {key: gateway.send(key, replicas) for key in KEYS}
    gateway.look([])
    assert {key: gateway.send(key, [seen(name) for name in "abc"]) for key in KEYS} == began


def test_memory_of_losses_is_bounded() -> None:
    gateway, replicas = Gateway(), [seen(name) for name in "ab"]
    for key in range(1, HOMES_MAX + 3):
        gateway.homes.settle(key, "a")
    assert [gateway.homes.find(key) for key in (1, 2, 3)] == ["", "", "a"]
    for number in range(SLOTS_MAX + 1):
        gateway.look([*replicas, seen(str(number))])
    gateway.look(replicas)
    assert [bool(gateway.homes.lost(str(number))) for number in (0, 1, SLOTS_MAX)] == [False, True, True]
    for _ in range(LOSSES_MAX + 1):
        gateway.look([seen("a"), replicas[1]])
    assert gateway.homes.find(3) == "b", "the first of its losses is forgotten, the next ones say the same"
