"""All controls of a cluster with several; from outside, the leading one."""

import asyncio
from pathlib import Path

from forebay.control.deploying import Deployments
from forebay.control.loop import Controller
from forebay.control.plan import Places, Plan
from forebay.core.reconcile import Kind
from forebay.sim.full.control import CLUSTER, Control, SharedSnapshot, Snapshots
from forebay.sim.full.event_log import EventLog
from forebay.sim.full.leading.leadership import ControllerLeadership, LeaderCheck
from forebay.sim.full.machine import Machine
from forebay.sim.full.profile import Profile
from forebay.sim.full.rollouts.scenario import RolloutScenario
from forebay.sim.network.network import Network
from forebay.store.database import Store


class ControllerGroup:
    """The controls of a profile, each its own process, with one store and one snapshot file."""

    deployments: Deployments | None = None
    scenario: RolloutScenario | None = None

    def __init__(
        self,
        profile: Profile,
        *,
        network: Network,
        machine: Machine,
        group: asyncio.TaskGroup,
        folder: Path,
        event_log: EventLog,
        store: Store,
    ) -> None:
        self.leader_check = LeaderCheck(event_log)
        self._event_log = event_log
        places = Places(folder)
        self.shared_snapshot = shared_snapshot = SharedSnapshot(places.snapshot)
        self.members = tuple(
            Control(
                profile, network=network, machine=machine, group=group, folder=folder, event_log=event_log,
                shared_snapshot=shared_snapshot, store=store, name=f"control-{number}",
                leadership=ControllerLeadership(store, CLUSTER, places.epochs, self.leader_check),
            )
            for number in range(profile.controls)
        )  # fmt: skip
        self._last = self.members[0]
        """The last known leader."""

    @property
    def leader(self) -> Control | None:
        """The rightful leader, if its process runs."""
        for member in self.members:
            leadership = member.leadership
            if (
                member.alive
                and leadership is not None
                and leadership.leads
                and leadership.epoch == self.leader_check.epoch
            ):
                self._last = member
                return member
        return None

    @property
    def epoch(self) -> int:
        """The epoch of the latest leader."""
        return self.leader_check.epoch

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
        if leader is None or leader.leadership is None or not leader.leadership.has_valid_lease:
            return False
        return leader.settled and all(member.alive for member in self.members)

    def check_leader(self, epoch: int) -> None:
        """Check that exactly one control leads, still with this epoch."""
        leading = [
            member.node for member in self.members if member.leadership is not None and member.leadership.leads
        ]
        told = f"{', '.join(leading) or 'nobody'}, epoch {self.leader_check.epoch} after {epoch}"
        self._event_log.expect(
            len(leading) == 1 and self.leader_check.epoch == epoch, "exactly one control leads after recovery", told
        )
