"""All controls of a cluster with several; from outside, the leading one."""

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
    """The controls of a profile, each its own process, with one store and one snapshot file."""

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
        """The last known leader."""

    @property
    def leader(self) -> Control | None:
        """The rightful leader, if its process runs."""
        for member in self.members:
            seat = member.seat
            if member.alive and seat is not None and seat.leads and seat.epoch == self.reign.epoch:
                self._last = member
                return member
        return None

    @property
    def epoch(self) -> int:
        """The epoch of the latest leader."""
        return self.reign.epoch

    @property
    def node(self) -> str:
        """The node of the current or last leader."""
        return (self.leader or self._last).node

    @property
    def plan(self) -> Plan:
        """The desired state."""
        return self._last.plan

    @property
    def snapshots(self) -> Snapshots:
        """The leader's snapshots."""
        return (self.leader or self._last).snapshots

    @property
    def controller(self) -> Controller | None:
        """The leader's controller."""
        leader = self.leader
        return None if leader is None else leader.controller

    def start(self) -> None:
        """Start all controls that do not run."""
        for member in self.members:
            if not member.alive:
                member.start()

    def kill(self) -> None:
        """Kill the leader."""
        leader = self.leader
        if leader is not None:
            leader.kill()

    def end(self) -> None:
        """Kill all."""
        for member in self.members:
            member.kill()

    def retire(self) -> None:
        """Kill the waiting ones, so that the leader is the only one."""
        for member in self.members:
            if member is not self.leader:
                member.kill()

    def upgrade(self, kind: Kind) -> None:
        """Require replacement of every unit of a kind."""
        for member in self.members:
            member.upgrade(kind)

    def check(self) -> None:
        """Check the invariants that hold whenever control is idle."""
        (self.leader or self._last).check()

    @property
    def settled(self) -> bool:
        """Whether the desired state is reached, with one leader and all controls running."""
        leader = self.leader
        if leader is None or leader.seat is None or not leader.seat.sure:
            return False
        return leader.settled and all(member.alive for member in self.members)

    def check_leader(self, epoch: int) -> None:
        """Check that exactly one control leads, still with this epoch."""
        leading = [member.node for member in self.members if member.seat is not None and member.seat.leads]
        told = f"{', '.join(leading) or 'nobody'}, epoch {self.reign.epoch} after {epoch}"
        self._book.expect(len(leading) == 1 and self.reign.epoch == epoch, "after the healing one leads", told)
