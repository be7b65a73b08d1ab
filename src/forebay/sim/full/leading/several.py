"""All controls of a cluster that has several: seen from outside, the one that leads."""

import asyncio
from pathlib import Path

from forebay.control.deploying import Deployments
from forebay.control.loop import Controller
from forebay.control.plan import Places, Plan
from forebay.core.reconcile import Kind
from forebay.sim.full.book import Book
from forebay.sim.full.control import CLUSTER, Control, Paper, Snapshots
from forebay.sim.full.leading.seats import Reign, Seat
from forebay.sim.full.machine import Machine
from forebay.sim.full.profile import Profile
from forebay.sim.full.rollouts.stage import Stage
from forebay.sim.network.network import Network
from forebay.store.database import Store


class Several:
    """As many controls as the profile says, each a process of its own, with one store and one snapshot file."""

    deployments: Deployments | None = None
    stage: Stage | None = None

    def __init__(
        self,
        profile: Profile,
        *,
        network: Network,
        machine: Machine,
        group: asyncio.TaskGroup,
        folder: Path,
        book: Book,
        store: Store,
    ) -> None:
        self.reign = Reign(book)
        self._book = book
        places = Places(folder)
        self.paper = paper = Paper(places.snapshot)
        self.members = tuple(
            Control(
                profile, network=network, machine=machine, group=group, folder=folder, book=book, paper=paper,
                store=store, name=f"control-{number}", seat=Seat(store, CLUSTER, places.epochs, self.reign),
            )
            for number in range(profile.controls)
        )  # fmt: skip
        self._last = self.members[0]
        """Who was seen to lead last."""

    @property
    def leader(self) -> Control | None:
        """Whoever leads by right, if its process runs."""
        for member in self.members:
            seat = member.seat
            if member.alive and seat is not None and seat.leads and seat.epoch == self.reign.epoch:
                self._last = member
                return member
        return None

    @property
    def epoch(self) -> int:
        """Of the last one who began to lead."""
        return self.reign.epoch

    @property
    def node(self) -> str:
        """Of the leader, or of who was it last."""
        return (self.leader or self._last).node

    @property
    def plan(self) -> Plan:
        """What is wanted."""
        return self._last.plan

    @property
    def snapshots(self) -> Snapshots:
        """As the leader writes them."""
        return (self.leader or self._last).snapshots

    @property
    def controller(self) -> Controller | None:
        """Of the leader."""
        leader = self.leader
        return None if leader is None else leader.controller

    def start(self) -> None:
        """Begin, or begin again: all that do not run."""
        for member in self.members:
            if not member.alive:
                member.start()

    def kill(self) -> None:
        """The leader is gone."""
        leader = self.leader
        if leader is not None:
            leader.kill()

    def end(self) -> None:
        """All are gone."""
        for member in self.members:
            member.kill()

    def retire(self) -> None:
        """Those that wait leave, so that the leader is the last one."""
        for member in self.members:
            if member is not self.leader:
                member.kill()

    def upgrade(self, kind: Kind) -> None:
        """Every unit of a kind is to be replaced."""
        for member in self.members:
            member.upgrade(kind)

    def check(self) -> None:
        """What must hold whenever control does nothing."""
        (self.leader or self._last).check()

    @property
    def settled(self) -> bool:
        """Whether all is as it is wanted: one leads, and the others know."""
        leader = self.leader
        if leader is None or leader.seat is None or not leader.seat.sure:
            return False
        return leader.settled and all(member.alive for member in self.members)

    def check_leader(self, epoch: int) -> None:
        """One leads, the same as when its epoch was `epoch`, and nobody else thinks so."""
        leading = [member.node for member in self.members if member.seat is not None and member.seat.leads]
        told = f"{', '.join(leading) or 'nobody'}, epoch {self.reign.epoch} after {epoch}"
        self._book.expect(len(leading) == 1 and self.reign.epoch == epoch, "after the healing one leads", told)
