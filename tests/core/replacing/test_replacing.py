"""Replacing outdated units: start and stop order, with enough units ready at all times."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.world import World, gateway, replica
from tests.examples import examples

from forebay.core.model import ReplicaState
from forebay.core.reconcile import Place, needs_spare

READY = ReplicaState.READY


def test_single_gateway_stops_only_when_its_successor_answers() -> None:
    world = World([gateway()])
    world.run(5)
    world.wanted = [gateway(digest="g2")]

    assert [type(a) for a in world.turn().actions] == [Place]
    while world.slot("gateway-0") is not READY:
        assert world.units["gateway-0", 1].asked_at is None
        world.run(0.1)
    world.run(2)
    assert world.live("gateway-0") == [2]


def test_outdated_gateway_keeps_running_while_its_successor_never_answers() -> None:
    world = World([gateway()])
    world.run(5)
    world.dies_at_once = True
    world.wanted = [gateway(digest="g2")]

    world.run(60)
    assert world.live("gateway-0") == [1]
    assert world.slot("gateway-0") is ReplicaState.QUARANTINED
    world.wanted = []
    world.run(2)
    assert world.units == {}


def test_older_gateway_of_a_slot_keeps_running_until_the_newer_one_answers() -> None:
    world = World([gateway()])
    world.add(gateway(), 1)
    world.add(gateway(), 2, age_s=0)

    assert world.turn().actions == ()
    world.run(3)
    assert world.live("gateway-0") == [2]


def test_several_gateways_are_replaced_one_after_the_other() -> None:
    world = World([gateway(), gateway(1)])
    world.run(5)
    world.wanted = [gateway(digest="g2"), gateway(1, digest="g2")]

    fewest = 2
    for _ in range(60):
        world.run(0.1)
        fewest = min(fewest, [s.state for s in world.state.slots].count(READY))

    assert fewest == 1
    assert {unit.seen.digest for unit in world.units.values()} == {"g2"}


def replace_all(world: World, replicas: int, digest: str, seconds: float = 60.0) -> int:
    """Run with so many replicas wanted, and a spare when it is needed. Returns the fewest that were ready."""
    slots = [replica("chat", index, digest) for index in range(replicas)]
    spare = replica("chat", replicas, digest)
    fewest, until = 1000, world.now + seconds
    while world.now < until:
        units = world.look().units or ()
        world.wanted = [*slots, spare] if needs_spare(slots, spare, world.state, units) else slots
        world.run(0.1)
        fewest = min(fewest, [s.state for s in world.state.slots].count(READY))
    return fewest


@settings(max_examples=examples(40), deadline=None)
@given(before=st.integers(1, 4), after=st.integers(1, 4), drains_s=st.floats(0, 4), forget=st.booleans())
def test_replacing_replicas_never_reduces_the_number_of_ready_ones(
    before: int, after: int, drains_s: float, forget: bool
) -> None:
    world = World([replica("chat", index) for index in range(before)])
    world.run(10)
    for unit in world.units.values():
        unit.drains_s = drains_s
    if forget:  # a new control goes on in the middle
        replace_all(world, after, "d2", 3)
        world.state = type(world.state)()
        world.run(0.2)  # until the replicas are heard again

    fewest = replace_all(world, after, "d2")

    assert fewest >= (min(before, after) if before > 1 else 0)
    assert {unit.seen.digest for unit in world.units.values()} == {"d2"}
    assert len(world.live()) == after


def test_surge_replica_that_never_gets_ready_costs_no_other() -> None:
    world = World([replica("chat", index) for index in range(2)])
    world.run(10)
    world.dies_at_once = True

    assert replace_all(world, 2, "d2") == 2
    world.dies_at_once = False
    assert replace_all(world, 2, "d1") == 2
    assert sorted(world.units) == [("chat-0", 1), ("chat-1", 1)]


def test_a_single_replica_has_no_spare_unless_one_runs_already() -> None:
    world = World([replica("chat")])
    world.run(10)
    slots, spare = [replica("chat", digest="d2")], replica("chat", 1, "d2")

    assert not needs_spare(slots, spare, world.state, world.look().units or ())
    world.add(replica("chat", 1), 1)
    assert needs_spare(slots, spare, world.state, world.look().units or ())
