"""Wanted slots against observed units: single rules, then everything together."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.world import Unit, World, gateway, replica
from tests.examples import examples

from forebay.core.lifecycle import Event
from forebay.core.model import LoadReport, ReplicaState
from forebay.core.reconcile import Answered, ClusterObservation, Kind, Place, Remove, Rules, Verdict

READY, STOPPED = ReplicaState.READY, ReplicaState.STOPPED


def ready_world(*slots: str) -> World:
    """A world with two chat replicas, an embedder and a gateway, all ready."""
    world = World([gateway(), replica("chat", 0), replica("chat", 1), replica("embed", 0)])
    world.run(5)
    assert {s.state for s in world.state.slots} == {READY}
    return world


def whys(verdicts: list[Verdict]) -> str:
    return " | ".join(move.why for verdict in verdicts for move in verdict.moves)


def test_empty_cluster_starts_gateways_and_then_the_first_replica_of_every_model() -> None:
    world = World([replica("chat", 0), replica("chat", 1), replica("embed", 0), gateway()])

    placed = [a.slot.id for a in world.turn().actions if isinstance(a, Place)]

    assert placed == ["gateway-0", "chat-0", "embed-0", "chat-1"]


def test_units_in_the_wanted_state_are_left_alone() -> None:
    world = ready_world()

    assert world.turn().actions == ()
    assert world.turn().look_again_s == world.rules.look_again_s


def test_unknown_units_are_not_treated_as_absent() -> None:
    world = ready_world()
    before = world.state

    verdict = world.turn(ClusterObservation(None, trouble="the disk is gone"))

    assert verdict.actions == ()
    assert world.state == before
    assert "the disk is gone" in verdict.why


def test_a_dead_replica_is_replaced_at_once_with_a_new_generation() -> None:
    world = ready_world()
    world.kill("chat-0")

    verdict = world.turn()

    assert [(a.slot.id, a.generation) for a in verdict.actions if isinstance(a, Place)] == [("chat-0", 2)]
    assert [m.event for m in verdict.moves] == [Event.DIED, Event.PLACED]
    assert "SIGKILL" in verdict.moves[0].why
    assert verdict.moves[0].last_words == "ouch"
    world.run(5)
    assert world.slot("chat-0") is READY
    assert ("chat-0", 1) not in world.units


def test_crash_loop_backs_off_up_to_the_maximum() -> None:
    world = World([replica("chat")], dies_at_once=True)

    verdicts = world.run(200)

    times = [at for at, _, _ in world.placed]
    waits = [b - a for a, b in pairwise(times)]
    assert waits[:7] == pytest.approx([0.2, 1.2, 2.2, 4.2, 8.2, 16.2, 30.2], abs=0.6)
    assert max(waits) <= world.rules.backoff_max_s + 1
    assert "failures in a row, starts again in" in whys(verdicts)
    slot = world.state.slots[0]
    assert slot.state is ReplicaState.QUARANTINED
    assert slot.last_words == "cannot go on"
    assert slot.restarts == slot.failures >= 8


def test_a_start_that_is_refused_counts_as_a_failure_and_backs_off() -> None:
    world = World([replica("chat")], refuse="no space left on device")

    verdicts = world.run(3)

    assert len(world.placed) <= 4
    assert "could not be started: no space left on device" in whys(verdicts)
    world.refuse = ""
    world.run(10)
    assert world.slot("chat-0") is READY


@pytest.mark.parametrize(("ready_s", "failures"), [(10, 2), (61, 1)])
def test_stable_time_resets_the_crash_back_off(ready_s: float, failures: int) -> None:
    world = World([replica("chat")])
    world.run(5)
    world.kill("chat-0")
    world.run(3 + ready_s)
    world.kill("chat-0")
    world.turn()

    assert world.state.slots[0].failures == failures
    assert world.state.slots[0].restarts == 2


def test_a_hung_replica_is_degraded_soon_then_killed_and_replaced() -> None:
    world = ready_world()
    world.units["chat-0", 1].hangs = True

    world.run(4)
    assert world.slot("chat-0") is ReplicaState.DEGRADED
    assert world.live("chat-0") == [1]
    verdicts = world.run(12)

    assert world.live("chat-0") == [2]
    assert world.slot("chat-0") is READY
    assert "no answer for 10 s" in whys(verdicts)


def test_replica_reporting_a_stalled_engine_is_degraded_with_the_reason() -> None:
    world = ready_world()
    world.units["chat-0", 1].stalled_s = 7.0

    verdicts = world.run(2)

    assert world.slot("chat-0") is ReplicaState.DEGRADED
    assert "its engine has been unresponsive for 7 s" in whys(verdicts)


def test_hung_replica_keeps_its_last_log_lines_when_killed() -> None:
    world = ready_world()
    world.units["chat-0", 1].hangs = True

    world.run(20)

    assert {s.id: s for s in world.state.slots}["chat-0"].last_words == "ouch"


def test_record_of_a_dead_replica_is_kept_until_its_successor_starts() -> None:
    world = World([replica("chat")], dies_at_once=True)
    world.run(1)
    assert world.slot("chat-0") is ReplicaState.QUARANTINED

    assert list(world.units) == [("chat-0", 2)]
    assert world.turn().actions == ()


def test_a_short_silence_kills_no_replica() -> None:
    world = ready_world()
    world.units["chat-0", 1].hangs = True
    world.run(8)
    world.units["chat-0", 1].hangs = False
    world.run(5)

    assert world.live("chat-0") == [1]
    assert world.slot("chat-0") is READY
    assert world.state.slots[0].restarts == 0


def test_a_pause_of_control_itself_kills_no_replica() -> None:
    world = ready_world()
    world.units["chat-0", 1].hangs = True
    world.turn()
    world.now += 3600
    verdict = world.turn()

    assert [a for a in verdict.actions if isinstance(a, Remove)] == []


def test_a_replica_that_never_answers_is_replaced_after_its_listen_timeout() -> None:
    world = World([replica("chat")])
    world.turn()
    world.units["chat-0", 1].born = world.now + 1000

    verdicts = world.run(12)

    assert "did not answer within 10 s of its start" in whys(verdicts)
    assert world.live("chat-0") == [2]


def test_a_replica_that_never_gets_ready_is_replaced_after_its_load_timeout() -> None:
    world = World([replica("chat")])
    loading = LoadReport("chat-0", 1, "chat", "r-1", ReplicaState.WARMING)
    verdicts = []
    for _ in range(25):
        seen = world.look()
        answers = {key: Answered(loading) for key in seen.answers}
        verdicts.append(world.turn(replace(seen, answers=answers)))
        world.now += 1

    assert "was not ready within 20 s" in whys(verdicts)


def test_externally_stopped_replica_drains_and_is_then_replaced() -> None:
    world = ready_world()
    world.units["chat-0", 1].asked_at = world.now
    world.units["chat-0", 1].drains_s = 3

    world.run(2)
    assert world.slot("chat-0") is ReplicaState.DRAINING
    assert world.live("chat-0") == [1]
    world.run(5)
    assert world.live("chat-0") == [2]
    assert world.slot("chat-0") is READY


def test_externally_stopped_replica_that_does_not_end_is_killed() -> None:
    world = ready_world()
    world.units["chat-0", 1].asked_at = world.now
    world.units["chat-0", 1].drains_s = 1e9

    verdicts = world.run(20)

    assert "was told to stop by something other than control, and did not end; killed" in whys(verdicts)
    assert world.live("chat-0") == [2]


def test_running_units_are_adopted_without_counting_a_restart() -> None:
    world = ready_world()
    world.state = type(world.state)()

    verdict = world.turn()

    assert verdict.actions == ()
    assert [m.event for m in verdict.moves].count(Event.ADOPTED) == 4
    assert {s.state for s in world.state.slots} == {READY}
    assert {s.restarts for s in world.state.slots} == {0}


def test_dead_units_found_at_the_start_set_the_generation_but_no_back_off() -> None:
    world = World([replica("chat")])
    world.add(world.wanted[0], 7)
    world.kill("chat-0", 7)

    verdict = world.turn()

    assert [(a.slot.id, a.generation) for a in verdict.actions if isinstance(a, Place)] == [("chat-0", 8)]
    assert world.state.slots[0].failures == 0


def test_of_two_live_units_of_a_slot_the_newest_stays() -> None:
    world = World([replica("chat")])
    world.add(world.wanted[0], 3)
    world.add(world.wanted[0], 5)

    world.run(5)

    assert world.live("chat-0") == [5]
    assert world.slot("chat-0") is READY


def test_an_outdated_replica_drains_before_its_successor_starts() -> None:
    world = World([replica("chat")])
    world.run(5)
    world.units["chat-0", 1].drains_s = 2
    world.wanted = [replica("chat", digest="d2")]

    first = world.turn()
    assert [type(a) for a in first.actions] == [Remove]
    assert first.actions[0] == Remove(
        "chat-0", 1, 5.0, "outdated: its settings, model or version of Forebay have changed"
    )
    world.run(6)
    assert world.live("chat-0") == [2]
    assert world.units["chat-0", 2].seen.digest == "d2"


def test_outdated_replicas_of_a_model_are_replaced_one_after_the_other() -> None:
    world = ready_world()
    world.wanted = [gateway(), replica("chat", 0, "d2"), replica("chat", 1, "d2"), replica("embed", 0)]

    fewest = 2
    for _ in range(100):
        world.run(0.1)
        ready = [s for s in world.state.slots if s.id.startswith("chat") and s.state is READY]
        fewest = min(fewest, len(ready))

    assert fewest == 1
    assert {u.seen.digest for k, u in world.units.items() if k[0].startswith("chat")} == {"d2"}


def test_a_new_revision_that_never_gets_ready_does_not_take_the_old_one_down() -> None:
    world = ready_world()
    world.wanted = [gateway(), replica("chat", 0, "d2"), replica("chat", 1, "d2"), replica("embed", 0)]
    world.dies_at_once = True

    world.run(60)

    assert world.slot("chat-1") is READY
    assert world.units["chat-1", 1].seen.digest == "d1"
    assert "waiting for the others" in {s.id: s for s in world.state.slots}["chat-1"].why


def test_the_successor_of_an_outdated_gateway_starts_while_it_drains() -> None:
    world = World([gateway()])
    world.run(5)
    world.units["gateway-0", 1].drains_s = 4
    world.wanted = [gateway(digest="g2")]

    world.run(2)

    assert world.live("gateway-0") == [1, 2]
    assert world.slot("gateway-0") is READY
    world.run(5)
    assert world.live("gateway-0") == [2]


def test_unit_that_does_not_drain_in_time_is_killed() -> None:
    world = ready_world()
    world.units["embed-0", 1].drains_s = 1e9
    world.wanted = world.wanted[:3]

    world.run(4.5)
    assert world.live("embed-0") == [1]
    world.run(2)
    assert world.live("embed-0") == []
    assert "embed-0" not in {s.id for s in world.state.slots}
    assert not [k for k in world.units if k[0] == "embed-0"]


def test_lowered_grace_limit_kills_draining_units() -> None:
    world = ready_world()
    for unit in world.units.values():
        unit.drains_s = 1e9
    world.wanted = []
    world.run(1)
    assert len(world.live()) == 4

    world.rules = Rules(grace_s_max=0.0)
    world.run(1)

    assert world.units == {}
    assert world.state.slots == ()


def test_number_of_starting_replicas_is_limited() -> None:
    world = World([replica("chat", n) for n in range(10)], rules=Rules(starting_max=3))

    busiest = 0
    for _ in range(100):
        world.run(0.1)
        states = [s.state for s in world.state.slots]
        busiest = max(busiest, states.count(ReplicaState.STARTING) + states.count(ReplicaState.WARMING))

    assert busiest == 3
    assert {s.state for s in world.state.slots} == {READY}


SLOTS = [gateway(), gateway(1), replica("chat", 0), replica("chat", 1), replica("embed", 0)]
FAULTS = st.lists(
    st.tuples(
        st.sampled_from(["kill", "hang", "wake", "unknown", "forget", "double", "want", "refuse", "accept", "wait"]),
        st.integers(0, 4),
        st.floats(0.05, 12),
    ),
    max_size=25,
)


def _fault(world: World, kind: str, slot_number: int, unit: Unit | None) -> None:
    slot = SLOTS[slot_number]
    match kind:
        case "kill" if unit:
            world.kill(*unit.seen.key)
        case "hang" if unit:
            unit.hangs = True
        case "wake" if unit:
            unit.hangs = False
        case "forget":
            world.state = type(world.state)()
        case "double" if not unit or slot.kind is Kind.GATEWAY:
            pass
        case "double" if unit:
            generation = max(g for s, g in world.units if s == slot.id) + 1
            world.add(slot, generation)
        case "want":
            world.wanted = [*SLOTS[:slot_number], replace(slot, digest="d9")]
        case "refuse":
            world.refuse = "no room"
        case "accept":
            world.refuse = ""


@settings(max_examples=examples(60), deadline=None)
@given(FAULTS)
def test_reconciliation_converges_to_the_wanted_state(faults: list[tuple[str, int, float]]) -> None:
    world = World(list(SLOTS))
    for kind, slot_number, seconds in faults:
        live = world.live(SLOTS[slot_number].id)
        unit = world.units[SLOTS[slot_number].id, live[-1]] if live else None
        if kind == "unknown":
            assert world.turn(ClusterObservation(None, trouble="?")).actions == ()
        _fault(world, kind, slot_number, unit)
        if kind == "double":
            world.turn()  # the world must see the double before it may place into the slot again
        world.run(seconds)

    world.refuse = ""
    for unit in world.units.values():
        unit.hangs = False
    world.settle()

    wanted = {slot.id: slot for slot in world.wanted}
    assert sorted(k[0] for k, u in world.units.items() if u.seen.alive) == sorted(wanted)
    assert {s.id: s.state for s in world.state.slots} == dict.fromkeys(wanted, READY)
    assert all(u.seen.digest == wanted[k[0]].digest for k, u in world.units.items() if u.seen.alive)
    assert world.turn().actions == ()
