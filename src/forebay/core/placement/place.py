"""Which replica runs where: running ones stay, new ones are placed so that as many as possible fit.

Each replica in search gets its best option. If there is none, all options of the new replicas before it are searched
again, up to `STEPS_MAX` steps: as long as that suffices, a replica waits only if it cannot run beside those before
it. Running replicas are never moved to make room.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from forebay.core.placement.fits import Option, obstacle, options, unsuited_spot
from forebay.core.placement.taken import Taken, claim_of
from forebay.core.placement.values import Claim, Need, Node, Placement, Spot

STEPS_MAX: Final = 500
"""Search steps, for all replicas together that have no option at first."""


def place(
    nodes: Iterable[Node], claims: Iterable[Claim], wanted: Sequence[Need], steps_max: int = STEPS_MAX
) -> Placement:
    """Where each of `wanted` should run. Per slot, at most one of `claims` is not leaving.

    Large replicas come first; those of low-priority models last.
    """
    search = _Search(nodes, claims, steps_max)
    moving = search.place(wanted)
    spots = search.kept | {slot: option.spot for slot, option in search.chosen.items()}
    stays = {}
    for slot in sorted(moving.keys() - spots.keys()):
        spots[slot] = search.running[slot]
        stays[slot] = f"{moving.pop(slot)}; it stays because it {search.refused.pop(slot)}"
    return Placement(spots, search.refused, moving, stays)


def unplaceable(nodes: Iterable[Node], claims: Iterable[Claim], wanted: Sequence[Need], node: str) -> dict[str, str]:
    """Slots of `wanted` that run on a node and would fit nowhere if it were barred, with the reasons."""
    search = _Search([_barred(each, node) for each in nodes], claims, STEPS_MAX)
    search.place(wanted)
    return {
        slot: why
        for slot, why in search.refused.items()
        if slot in search.running and search.running[slot].node == node
    }


def _barred(each: Node, name: str) -> Node:
    return replace(each, barred=each.barred or "to be drained") if each.name == name else each


def _order(need: Need) -> tuple[bool, int, int, int, str]:
    sizes = (need.gpus, need.device_bytes, need.memory_bytes)
    return need.low_priority, -sizes[0], -sizes[1], -sizes[2], need.slot


class _Search:
    """Working state of one placement: claimed resources, and choices so far."""

    def __init__(self, nodes: Iterable[Node], claims: Iterable[Claim], steps_max: int) -> None:
        self.nodes = {node.name: node for node in sorted(nodes, key=lambda node: node.name)}
        claims = list(claims)
        self.running = {claim.slot: claim.spot for claim in claims if not claim.leaves}
        self.own: dict[str, list[Claim]] = {}
        for claim in claims:
            self.own.setdefault(claim.slot, []).append(claim)
        self.taken = Taken(claims)
        self.kept: dict[str, Spot] = {}
        self.chosen: dict[str, Option] = {}
        self.refused: dict[str, str] = {}
        self._needs: list[Need] = []
        self._taking: dict[str, Claim] = {}
        self._steps = steps_max
        self._hopeless: Need | None = None
        """The last need without an option, regardless of its slot: equal ones have none either."""

    def place(self, wanted: Sequence[Need]) -> dict[str, str]:
        """Place all; returns why some of the running ones must move."""
        moving: dict[str, str] = {}
        for need in wanted:
            spot = self.running.get(need.slot)
            why = unsuited_spot(self.nodes.get(spot.node), need, spot) if spot else ""
            if spot and not why:
                self.kept[need.slot] = spot
            elif spot:
                moving[need.slot] = why
        for need in sorted((n for n in wanted if n.slot not in self.kept), key=_order):
            self.settle(need)
        return moving

    def settle(self, need: Need) -> None:
        """Place one more replica, if necessary by rearranging the new ones before it."""
        ways = self.ways(need)
        if ways:
            self._choose(need, ways[0])
        elif replace(need, slot="") == self._hopeless or not self._rearrange(need):
            self.refused[need.slot] = self.explain(need)
            self._hopeless = replace(need, slot="")
            return
        self._needs.append(need)

    def ways(self, need: Need) -> list[Option]:
        """All current options of a replica."""
        with self._empty(need.slot):
            return sorted(option for node in self.nodes.values() for option in options(node, need, self.taken))

    def explain(self, need: Need) -> str:
        """Why a replica has no option."""
        nodes = [node for node in self.nodes.values() if not need.nodes or node.name in need.nodes]
        with self._empty(need.slot):
            each = [f"{node.name} {obstacle(node, need, self.taken)}" for node in nodes]
        return f"fits nowhere: {'; '.join(each)}" if each else "fits nowhere: none of its nodes exists"

    @contextmanager
    def _empty(self, slot: str) -> Iterator[None]:
        """Temporarily without the slot's own units, as its next one starts after they have ended."""
        own = self.own.get(slot, ())
        for claim in own:
            self.taken.drop(claim)
        try:
            yield
        finally:
            for claim in own:
                self.taken.add(claim)

    def _choose(self, need: Need, option: Option) -> None:
        self.chosen[need.slot] = option
        claim = self._taking[need.slot] = claim_of(need, self.nodes[option.spot.node], option.spot)
        self.taken.add(claim)

    def _unchoose(self, need: Need) -> None:
        del self.chosen[need.slot]
        self.taken.drop(self._taking.pop(need.slot))

    def _rearrange(self, need: Need) -> bool:
        """Search a placement of all new replicas and this one; on failure nothing has changed."""
        before = dict(self.chosen)
        needs = [*self._needs, need]
        for placed in self._needs:
            self._unchoose(placed)
        if self._needs and self.ways(need) and self._search(needs):
            return True
        for placed in self._needs:
            self._choose(placed, before[placed.slot])
        return False

    def _search(self, needs: Sequence[Need]) -> bool:
        if not needs:
            return True
        for option in self.ways(needs[0]):
            if not self._steps:
                return False
            self._steps -= 1
            self._choose(needs[0], option)
            if self._search(needs[1:]):
                return True
            self._unchoose(needs[0])
        return False
