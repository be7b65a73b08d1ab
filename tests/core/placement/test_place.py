"""Placement of replicas, and the explanations when they do not fit."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.placement.fits import options
from forebay.core.placement.place import STEPS_MAX, place, unplaceable
from forebay.core.placement.taken import Taken, claim_of
from forebay.core.placement.values import GIB, Claim, Device, Need, Node, Spot

H100 = 80 * GIB


def gpu(number: int, gib: float = 80, links: Iterable[int] = (), **more: object) -> Device:
    joined = frozenset(f"g{each}" for each in links)
    return replace(Device(f"g{number}", f"GPU {number}", round(gib * GIB), links=joined), **more)  # type: ignore[arg-type]


def node(name: str, *devices: Device, cpus: int = 8, gib: float = 64, **more: object) -> Node:
    return replace(Node(name, round(gib * GIB), tuple(range(cpus)), devices), **more)  # type: ignore[arg-type]


def need(slot: str, gib: float = 1, **more: object) -> Need:
    """Of the node's memory, or with `gpus` of each of them."""
    size, model = round(gib * GIB), slot.rpartition("-")[0]
    own = {"device_bytes": size} if more.get("gpus") else {"memory_bytes": size}
    return replace(Need(slot, model), **{**own, **more})  # type: ignore[arg-type]


def runs(wanted: Need, at: Node, *devices: str, cpus: tuple[int, ...] = (), leaves: bool = False) -> Claim:
    return claim_of(wanted, at, Spot(at.name, devices, cpus), leaves)


def at(nodes: Sequence[Node], wanted: Sequence[Need], claims: Sequence[Claim] = ()) -> dict[str, str]:
    """Where each slot runs: `a`, or `a:g0,g1`."""
    spots = place(nodes, claims, wanted).spots
    return {slot: ":".join(filter(None, (s.node, ",".join(s.devices)))) for slot, s in sorted(spots.items())}


def why(nodes: Sequence[Node], wanted: Need, claims: Sequence[Claim] = ()) -> str:
    return place(nodes, claims, [wanted]).waits[wanted.slot]


PAIRS = node("a", gpu(0, links=[1]), gpu(1, links=[0]), gpu(2, links=[3]), gpu(3, links=[2]))
TWO = (node("a"), node("b"))


@pytest.mark.parametrize(
    ("nodes", "wanted", "expected"),
    [
        pytest.param(TWO, [need("m-0"), need("m-1")], {"m-0": "a", "m-1": "b"}, id="spread over nodes"),
        pytest.param(
            TWO, [need("m-0", spread=False), need("n-0", spread=False)], {"m-0": "a", "n-0": "a"}, id="packed on one"
        ),
        pytest.param(
            (node("a", gpu(0)), node("b")), [need("m-0"), need("m-1")], {"m-0": "b", "m-1": "a"}, id="GPUs are spared"
        ),
        pytest.param(
            (node("a", gpu(0), gpu(1)),),
            [need("m-0", 30, gpus=1), need("n-0", 30, gpus=1), need("o-0", 70, gpus=1)],
            {"m-0": "a:g1", "n-0": "a:g1", "o-0": "a:g0"},
            id="two small ones share a GPU and leave one whole",
        ),
        pytest.param(
            (node("a", gpu(0), gpu(1)),),
            [need("m-0", fraction=0.5, gpus=1), need("n-0", fraction=0.5, gpus=1)],
            {"m-0": "a:g0", "n-0": "a:g0"},
            id="two halves are one",
        ),
        pytest.param(
            (node("a", gpu(0), gpu(1), gpu(2)),),
            [need("m-0", 2, gpus=1), need("m-1", 2, gpus=1), need("m-2", 2, gpus=1, spread=False)],
            {"m-0": "a:g0", "m-1": "a:g1", "m-2": "a:g0"},
            id="replicas of a model on GPUs of their own",
        ),
        pytest.param(
            (node("a", gpu(0), gpu(1, 10, profile="1g.10gb")),),
            [need("m-0", 8, gpus=1)],
            {"m-0": "a:g1"},
            id="a slice rather than a whole GPU",
        ),
        pytest.param(
            (PAIRS,), [need("m-0", 40, gpus=2, whole=True)], {"m-0": "a:g0,g1"}, id="a group that NVLink joins"
        ),
        pytest.param(
            (PAIRS,),
            [need("m-0", 40, gpus=1, whole=True), need("n-0", 39, gpus=1, whole=True)],
            {"m-0": "a:g0", "n-0": "a:g1"},
            id="single ones break one pair and not two",
        ),
        pytest.param(
            (node("a", gpu(0, 24), gpu(1, 80)),),
            [need("m-0", 20, gpus=1, whole=True)],
            {"m-0": "a:g0"},
            id="the smallest GPU that will do",
        ),
        pytest.param(
            (node("a", gpu(0, numa=0), gpu(1, numa=1), gpu(2, numa=0)),),
            [need("m-0", 40, gpus=2, whole=True)],
            {"m-0": "a:g0,g2"},
            id="devices of one part of the machine",
        ),
        pytest.param(
            (node("a", gpu(0)), node("b", fallback=True)),
            [need("m-0", 60, gpus=1, whole=True), need("n-0", 8, gpus=1, low_priority=True, fallback_bytes=9 * GIB)],
            {"m-0": "a:g0", "n-0": "b"},
            id="low priority falls back to cores",
        ),
        pytest.param(
            (node("a", gpu(0)), node("b", fallback=True)),
            [need("n-0", 8, gpus=1, low_priority=True)],
            {"n-0": "a:g0"},
            id="and has a GPU if there is one",
        ),
        pytest.param(
            (node("a", labels=frozenset({"eu"})), node("b")),
            [need("m-0", nodes=frozenset({"b"})), need("n-0", labels=frozenset({"eu"}))],
            {"m-0": "b", "n-0": "a"},
            id="nodes and labels that are asked for",
        ),
        pytest.param(
            (node("a", gpu(0, kind="L4"), gpu(1, kind="H100")),),
            [need("m-0", 8, gpus=1, kinds=frozenset({"H100"}))],
            {"m-0": "a:g1"},
            id="kinds that are asked for",
        ),
    ],
)
def test_replica_is_placed_at_the_best_fit(
    nodes: Sequence[Node], wanted: Sequence[Need], expected: dict[str, str]
) -> None:
    assert at(nodes, wanted) == expected


def test_new_replicas_are_rearranged_to_fit_one_more() -> None:
    nodes = (node("a", gpu(0, 24), gpu(1, 40)),)
    wanted = [need("m-0", 20, gpus=1), need("n-0", 20, gpus=1), need("o-0", 24, gpus=1), need("p-0", 16, gpus=1)]
    assert set(at(nodes, wanted[:3])) == {"m-0", "n-0", "o-0"}
    assert place(nodes, (), wanted).waits == {
        "p-0": "fits nowhere: a GPU 0 has 0 GiB free of 24, 16 needed; GPU 1 has 0 GiB free of 40, 16 needed"
    }


def test_dedicated_cores_are_near_the_devices_and_never_shared() -> None:
    parts = ((0, 1, 2, 3), (4, 5, 6, 7))
    nodes = (node("a", gpu(0, numa=1), numa=parts),)
    first, second, third = need("m-0", 8, gpus=1, cpus=3), need("n-0", cpus=4), need("o-0", cpus=2)
    found = place(nodes, (), [first, second]).spots
    assert (found["m-0"].cpus, found["n-0"].cpus) == ((4, 5, 6), (0, 1, 2, 3))
    claims = [runs(first, nodes[0], "g0", cpus=(4, 5, 6)), runs(second, nodes[0], cpus=(0, 1, 2, 3))]
    assert why(nodes, third, claims) == "fits nowhere: a has 1 free cores of 8, 2 needed"
    assert why(nodes, replace(third, gpus=1), claims) == "fits nowhere: a has 1 free cores of 8, 2 needed"
    across = replace(third, cpus=5)
    assert place(nodes, claims[:1], [across]).spots["o-0"].cpus == (0, 1, 2, 3, 7)


FULL = node("a", gpu(0), gpu(1, barred="quarantined: XID 79"))
HOLDER = need("old-0", 67.9, gpus=1)


@pytest.mark.parametrize(
    ("nodes", "wanted", "expected"),
    [
        pytest.param(
            (FULL,),
            need("m-0", 16.3, gpus=1),
            "a GPU 0 has 12.1 GiB free of 80, 16.3 needed; GPU 1 is quarantined: XID 79",
            id="room and health",
        ),
        pytest.param(
            (FULL,), need("m-0", 8, gpus=1, whole=True), "a GPU 0 is taken by old-0; GPU 1 is quarantined: XID 79"
        ),
        pytest.param(
            (node("a", gpu(0, foreign_bytes=70 * GIB)),),
            need("m-0", 16, gpus=1),
            "a GPU 0 has 10 GiB free of 80 (70 are used by other programs), 16 needed",
        ),
        pytest.param((node("a", gib=4),), need("m-0", 5), "a has 4 GiB of memory free of 4, 5 needed"),
        pytest.param((node("a"),), need("m-0", 5, gpus=1), "a has no GPU"),
        pytest.param((node("a", barred="drained"),), need("m-0"), "a is drained"),
        pytest.param(TWO, need("m-0", labels=frozenset({"eu"})), "a has no label eu; b has no label eu"),
        pytest.param((node("a", fallback=True),), need("m-0"), "a is reserved for low-priority models"),
        pytest.param(
            (node("a", gpu(0, 10, profile="1g.10gb")),), need("m-0", 5, gpus=1, profile="2g.20gb"),
            "a GPU 0 is 1g.10gb, not 2g.20gb",
        ),
        pytest.param((node("a", gpu(0)),), need("m-0", 5, gpus=1, profile="x"), "a GPU 0 is a whole GPU, not x"),
        pytest.param(
            (node("a", gpu(0, profile="p"), gpu(1)),), need("m-0", 5, gpus=2),
            "a has 1 GPU available, 2 needed; GPU 0 is a MIG slice, which cannot be combined with others",
        ),
        pytest.param(
            (node("a", gpu(0, kind="L4")),), need("m-0", 5, gpus=1, kinds=frozenset({"A100", "H100"})),
            "a GPU 0 is not A100 or H100",
        ),
        pytest.param(
            (node("a", gpu(0, links=[1]), gpu(1, links=[0]), gpu(2)),), need("m-0", 5, gpus=3, linked=True),
            "a has no 3 free GPUs that are all connected by NVLink",
        ),
        pytest.param((), need("m-0"), "none of its nodes exists"),
    ],
)  # fmt: skip
def test_unplaceable_replica_is_explained_per_node(nodes: Sequence[Node], wanted: Need, expected: str) -> None:
    claims = [runs(HOLDER, each, "g0") for each in nodes if each is FULL]
    assert why(nodes, wanted, claims) == f"fits nowhere: {expected}"


def test_leaving_units_are_named_in_reasons_while_they_use_capacity() -> None:
    claims = [runs(HOLDER, FULL, "g0", leaves=True)]
    assert "GPU 0 is taken by old-0 (leaving)" in why((FULL,), need("m-0", 8, gpus=1, whole=True), claims)


def test_running_replicas_are_not_moved_for_a_better_place() -> None:
    wanted = [need("m-0", 8, gpus=1), need("m-1", 8, gpus=1)]
    nodes = (node("a", gpu(0), gpu(1)), node("b", gpu(2)))
    claims = [runs(wanted[0], nodes[0], "g1"), runs(wanted[1], nodes[0], "g0")]
    assert at(nodes, wanted, claims) == {"m-0": "a:g1", "m-1": "a:g0"}
    crowded = [replace(each, device_bytes=70 * GIB) for each in wanted]
    both = [runs(crowded[0], nodes[0], "g1"), runs(crowded[1], nodes[0], "g1")]
    assert at(nodes, crowded, both) == {"m-0": "a:g1", "m-1": "a:g1"}, "also where too much is taken already"


SMALL = need("m-0", 8, gpus=1)
HOME = node("a", gpu(0), gpu(1))


@pytest.mark.parametrize(
    ("nodes", "wanted", "spot", "to"),
    [
        pytest.param(
            (replace(HOME, barred="drained"), node("b", gpu(5))), SMALL, ("g0",), "b:g5", id="a drained node"
        ),
        pytest.param((node("a", gpu(0, barred="ill"), gpu(1)),), SMALL, ("g0",), "a:g1", id="a sick device"),
        pytest.param((node("a", gpu(1)),), SMALL, ("g0",), "a:g1", id="a device that is gone"),
        pytest.param((node("b", gpu(5)),), SMALL, ("g0",), "b:g5", id="a node that is gone"),
        pytest.param((HOME,), replace(SMALL, gpus=2), ("g0",), "a:g0,g1", id="another number of devices"),
        pytest.param((HOME,), replace(SMALL, cpus=2), ("g0",), "a:g0", id="cores of its own from now on"),
    ],
)
def test_replica_in_a_forbidden_place_is_moved(
    nodes: Sequence[Node], wanted: Need, spot: tuple[str, ...], to: str
) -> None:
    claims = [Claim("m-0", "m", Spot("a", spot), device_bytes=(8 * GIB,))]
    found = place(nodes, claims, [wanted])
    assert at(nodes, [wanted], claims) == {"m-0": to}
    assert found.spots["m-0"] != claims[0].spot
    assert (found.waits, found.stays, set(found.moves)) == ({}, {}, {"m-0"})


def test_replica_without_an_alternative_stays_and_is_reported() -> None:
    nodes = (node("a", gpu(0, barred="quarantined: XID 79"), gpu(1, 4)),)
    found = place(nodes, [runs(SMALL, nodes[0], "g0")], [SMALL])
    assert found.spots == {"m-0": Spot("a", ("g0",))}
    assert found.waits == {}
    assert found.stays == {
        "m-0": "GPU 0 of a is quarantined: XID 79; it stays because it fits nowhere: "
        "a GPU 0 is quarantined: XID 79; GPU 1 has 4 GiB free of 4, 8 needed"
    }


def test_slot_can_reuse_the_place_of_its_leaving_unit() -> None:
    whole = replace(SMALL, whole=True)
    nodes = (node("a", gpu(0)),)
    assert at(nodes, [whole], [runs(whole, nodes[0], "g0", leaves=True)]) == {"m-0": "a:g0"}


def test_drain_is_checked_for_replicas_that_fit_nowhere() -> None:
    nodes = (node("a", gib=8), node("b", gib=4))
    wanted = [need("m-0", 3), need("n-0", 3)]
    claims = [runs(each, nodes[0]) for each in wanted]
    assert unplaceable(nodes, claims, wanted, "b") == {}
    assert unplaceable(nodes, claims, wanted[:1], "a") == {}
    assert unplaceable(nodes, claims, wanted, "a") == {
        "n-0": "fits nowhere: a is to be drained; b has 1 GiB of memory free of 4, 3 needed"
    }


def test_large_groups_of_many_devices_grow_along_their_links() -> None:
    sixteen = [gpu(n, links=[m for m in range(16) if m % 2 == n % 2 and m != n]) for n in range(16)]
    found = place([node("a", *sixteen)], [], [need("m-0", 8, gpus=8, linked=True, whole=True)]).spots["m-0"]
    assert found.devices == tuple(f"g{n}" for n in range(0, 16, 2))


def test_search_stops_at_its_step_limit_without_changes() -> None:
    nodes = [node("a", *(gpu(n, 10) for n in range(8)))]
    wanted = [need(f"m-{n}", 6 - n / 100, gpus=1) for n in range(8)]
    last = need("z-0", 5, gpus=1)
    found = place(nodes, [], [*wanted, last])
    assert set(found.spots) == {each.slot for each in wanted}
    assert "has 4 GiB free of 10" in found.waits["z-0"]
    assert STEPS_MAX < 8**8


SIZES = st.sampled_from([2, 3, 4, 5, 6])


@st.composite
def small_cases(draw: Callable[..., object]) -> tuple[list[Node], list[Need]]:
    """A few nodes with a few devices, and replicas that nearly fill them."""
    nodes, number = [], 0
    for name in draw(st.sampled_from(["a", "ab", "abc"])):  # type: ignore[attr-defined]
        devices = []
        for _ in range(draw(st.integers(0, 3))):  # type: ignore[call-overload]
            profile = draw(st.sampled_from(["", "", "1g"]))
            devices.append(gpu(number, draw(st.sampled_from([4, 6, 10])), profile=profile))  # type: ignore[arg-type]
            number += 1
        linked = draw(st.booleans())
        joined = [replace(d, links=frozenset(x.id for x in devices) - {d.id}) if linked else d for d in devices]
        nodes.append(node(name, *joined, cpus=4, gib=draw(st.sampled_from([4, 8]))))  # type: ignore[arg-type]
    wanted = []
    for index in range(draw(st.integers(1, 5))):  # type: ignore[call-overload]
        gpus = draw(st.sampled_from([0, 1, 1, 2]))
        more: dict[str, object] = {"gpus": gpus, "cpus": draw(st.sampled_from([0, 0, 2]))}
        if gpus:
            more |= {"whole": draw(st.booleans()), "linked": draw(st.booleans()), "memory_bytes": GIB}
        wanted.append(need(f"m{index}-0", draw(SIZES), **more))  # type: ignore[arg-type]
    return nodes, wanted


def exists(nodes: Sequence[Node], wanted: Sequence[Need]) -> bool:
    """By trying everything, and by rules of its own."""
    memory = {n.name: n.memory_bytes for n in nodes}
    cores = {n.name: len(n.cpus) for n in nodes}
    room = {d.id: d.memory_bytes for n in nodes for d in n.devices}
    users = {d.id: 0 for n in nodes for d in n.devices}

    def fits(d: Device, each: Need) -> bool:
        return room[d.id] >= each.device_bytes and not (each.whole and users[d.id]) and users[d.id] >= 0

    def rest(index: int) -> bool:
        if index == len(wanted):
            return True
        each = wanted[index]
        for n in nodes:
            if memory[n.name] < each.memory_bytes or cores[n.name] < each.cpus:
                continue
            for group in combinations([d for d in n.devices if fits(d, each)], each.gpus):
                if each.gpus > 1 and any(d.profile for d in group):
                    continue
                if each.linked and any(b.id not in a.links for a, b in combinations(group, 2)):
                    continue
                sizes = {d.id: room[d.id] if each.whole else each.device_bytes for d in group}
                memory[n.name] -= each.memory_bytes
                cores[n.name] -= each.cpus
                for id, size in sizes.items():
                    room[id] -= size
                    users[id] += 1
                found = rest(index + 1)
                memory[n.name] += each.memory_bytes
                cores[n.name] += each.cpus
                for id, size in sizes.items():
                    room[id] += size
                    users[id] -= 1
                if found:
                    return True
        return False

    return rest(0)


@given(small_cases())
def test_placement_succeeds_exactly_if_exhaustive_search_does(case: tuple[list[Node], list[Need]]) -> None:
    nodes, wanted = case
    found = place(nodes, [], wanted)
    assert (not found.waits) == exists(nodes, wanted)
    assert set(found.spots) | set(found.waits) == {each.slot for each in wanted}
    assert_within(nodes, wanted, found.spots)
    assert found == place(list(reversed(nodes)), [], list(reversed(wanted))), "in whatever order it is asked"
    by_name = {n.name: n for n in nodes}
    claims = [claim_of(each, by_name[s.node], s) for each in wanted if (s := found.spots.get(each.slot))]
    again = place(nodes, claims, [each for each in wanted if each.slot in found.spots])
    assert again.spots == found.spots, "what runs stays"


def assert_within(nodes: Sequence[Node], wanted: Sequence[Need], spots: object) -> None:
    """Nothing is taken twice, or beyond what there is."""
    assert isinstance(spots, dict)
    by_name = {n.name: n for n in nodes}
    taken = Taken(claim_of(each, by_name[s.node], s) for each in wanted if (s := spots.get(each.slot)))
    for n in nodes:
        assert taken.free_bytes(n) >= 0
        assert all(count <= 1 for (name, _), count in taken.cpus.items() if name == n.name)
        for d in n.devices:
            assert taken.free_device_bytes(n, d) >= 0


def test_empty_node_offers_each_of_its_devices() -> None:
    assert [o.spot.devices for o in options(HOME, SMALL, Taken())] == [("g0",), ("g1",)]
