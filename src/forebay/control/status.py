"""The status of the cluster as one document: the response of `/v1/status`, also used by the command line."""

import os
from dataclasses import dataclass
from typing import Any

from forebay import __version__
from forebay.control.leading.term import LeaderStatus
from forebay.control.loop import Controller, Phase
from forebay.control.plan import PlannedModel
from forebay.core.model import LoadReport, ReplicaState
from forebay.core.reconcile import ObservedUnit, SlotState
from forebay.wire.http1 import authority

FOLLOW = "follow"
"""The phase of a controller that does not lead."""


@dataclass(frozen=True)
class UnitStatus:
    """A gateway process, or what replicas have in common with it. Times are wall time, in seconds.

    A unit that is not running, or not observed yet, has no pid: 0 would mean the caller's process group to `kill`.
    """

    id: str
    generation: int
    pid: int | None
    url: str
    state: ReplicaState
    why: str
    since: float
    restarts: int
    starts_again_in_s: float | None
    last_words: str


@dataclass(frozen=True)
class ReplicaStatus(UnitStatus):
    """A replica, with the last load report of its worker."""

    model: str
    revision: str
    engine_pid: int | None
    engine_restarts: int
    in_flight: int
    running: int
    waiting: int
    capacity: int
    kv_used_tokens: int
    kv_total_tokens: int
    batch_fill: float
    grpc_port: int = 0
    standby: bool = False
    """Whether it is ready but on standby: gateways do not route to it."""
    node: str = ""
    devices: tuple[str, ...] = ()
    memory_bytes: int = 0
    """Its estimated need of node memory."""
    memory_used_bytes: int = 0
    """The node memory it actually uses; 0: not known yet."""
    misplaced: str = ""
    """Why it has no place, or should have another; empty: neither."""


@dataclass(frozen=True)
class RolloutStatus:
    """An active rollout. `since`: when its phase, or the current step, began; wall time, in seconds."""

    id: str
    kind: str
    canary: str
    phase: str
    step: int
    share: float
    paused: bool
    since: float
    why: str


@dataclass(frozen=True)
class ModelStatus:
    """A model. `revision`: the wanted one; during a rollout, the stable one."""

    name: str
    task: str
    engine: str
    source: str
    revision: str
    slo: dict[str, Any]
    ready: int
    wanted: int
    replicas: tuple[ReplicaStatus, ...]
    rollout: RolloutStatus | None = None
    standby: int = 0
    """How many of the ready replicas are on standby."""
    on_demand: bool = False
    """Whether it may have no replicas while there are no requests."""
    least: int | None = None
    """The current bounds of its scaling; null: it is not scaled."""
    most: int | None = None
    trouble: str = ""
    """Why no replica of its revision can be started; empty: they can."""

    @property
    def serves(self) -> bool:
        """Whether requests are served, possibly after a replica has started."""
        return self.ready > 0 or self.on_demand


@dataclass(frozen=True)
class Status:
    """A cluster. `ready`: every model has a ready replica or starts one on demand, and a gateway is ready."""

    cluster: str
    version: str
    pid: int
    ready: bool
    phase: str
    trouble: str
    gateway_url: str
    gateways: tuple[UnitStatus, ...]
    models: tuple[ModelStatus, ...]
    leader: LeaderStatus | None = None
    """With several controllers, the leader as far as known; the others report no units."""

    @property
    def complete(self) -> bool:
        """Whether every gateway and every wanted replica is ready."""
        gateways = all(g.state is ReplicaState.READY for g in self.gateways)
        return self.ready and gateways and all(m.ready == m.wanted for m in self.models)


def make_status(control: Controller, now: float, wall: float) -> Status:
    """The status at `now` on the loop's clock, which is `wall` in wall time."""
    states = {s.id: s for s in control.state.slots}
    gateways = tuple(
        _unit(control, states.get(g.id) or SlotState(g.id, now), now, wall) for g in control.plan.gateways
    )
    models = tuple(_model(control, model, states, now, wall) for model in control.plan.models)
    up = any(g.state is ReplicaState.READY for g in gateways) and all(m.serves for m in models)
    leading = control.leading
    leader = leading.status if leading is not None else None
    follows = leading is not None and not (leader is not None and leader.here)
    return Status(
        cluster=control.plan.cluster,
        version=__version__,
        pid=os.getpid(),
        ready=up and control.phase is Phase.RUN and not follows,
        phase=FOLLOW if follows else control.phase.name.lower(),
        trouble="" if follows else control.trouble or _store_trouble(control),
        gateway_url=control.plan.gateway_url,
        gateways=gateways,
        models=models,
        leader=leader,
    )


def _seen(control: Controller, s: SlotState) -> ObservedUnit | None:
    generation = s.unit.generation if s.unit else s.leaving[-1].generation if s.leaving else s.generation
    return control.units.get((s.id, generation))


def _unit(control: Controller, s: SlotState, now: float, wall: float) -> UnitStatus:
    return UnitStatus(**_common(control, s, now, wall, control.plan.gateway_url.partition(":")[0]))


def _common(control: Controller, s: SlotState, now: float, wall: float, scheme: str = "http") -> dict[str, Any]:
    unit = _seen(control, s)
    alive = unit if unit and unit.alive else None
    endpoint = alive.endpoint if alive else None
    return {
        "id": s.id,
        "generation": s.generation,
        "pid": alive.pid if alive else None,
        "url": f"{scheme}://{authority(endpoint.host, endpoint.port)}" if endpoint else "",
        "state": s.state,
        "why": s.why,
        "since": round(wall - (now - s.since), 3),
        "restarts": s.restarts,
        "starts_again_in_s": round(s.not_before - now, 1) if s.not_before > now and not s.unit else None,
        "last_words": s.last_words,
    }


def _model(
    control: Controller, model: PlannedModel, states: dict[str, SlotState], now: float, wall: float
) -> ModelStatus:
    replicas = tuple(
        _replica(control, model, states.get(slot.id) or SlotState(slot.id, now), now, wall) for slot in model.units
    )
    name = model.routes.name
    bounds = control.scaler.bounds(name) if control.scaler else None
    return ModelStatus(
        name=name,
        task=model.routes.task.value,
        engine=model.engine,
        source=model.source,
        revision=model.routes.revision,
        slo=model.slo.model_dump(exclude_defaults=True),
        ready=sum(r.state is ReplicaState.READY for r in replicas),
        wanted=len(model.units),
        replicas=replicas,
        rollout=_rollout(control, model.routes.name),
        standby=sum(r.standby for r in replicas),
        on_demand=model.routes.on_demand,
        least=bounds[0] if bounds else None,
        most=bounds[1] if bounds else None,
        trouble=control.deployments.hindrance(name, model.routes.revision) if control.deployments else "",
    )


def _store_trouble(control: Controller) -> str:
    trouble = control.deployments.trouble if control.deployments else ""
    return f"store: {trouble}; rollouts stay as they are" if trouble else ""


def _rollout(control: Controller, model: str) -> RolloutStatus | None:
    deployments = control.deployments
    rollout = deployments.under_way(model) if deployments else None
    if rollout is None:
        return None
    return RolloutStatus(
        id=rollout.id,
        kind=rollout.course.kind.value,
        canary=rollout.canary,
        phase=rollout.phase.value,
        step=rollout.step,
        share=rollout.share,
        paused=rollout.paused,
        since=rollout.since,
        why=rollout.why,
    )


def _replica(control: Controller, model: PlannedModel, s: SlotState, now: float, wall: float) -> ReplicaStatus:
    unit = _seen(control, s)
    report = control.reports.get(unit.key) if unit and unit.alive else None
    load = report or LoadReport(s.id, s.generation, model.routes.name, "", s.state)
    return ReplicaStatus(
        **_common(control, s, now, wall),
        model=model.routes.name,
        revision=load.revision,
        engine_pid=load.engine_pid or None,
        engine_restarts=load.engine_restarts,
        in_flight=load.in_flight,
        running=load.running,
        waiting=load.waiting,
        capacity=load.capacity,
        kv_used_tokens=load.kv_used_tokens,
        kv_total_tokens=load.kv_total_tokens,
        batch_fill=load.batch_fill,
        grpc_port=load.grpc_port,
        standby=control.standby is not None and (s.id, s.generation) in control.standby.standbys,
        node=unit.node if unit and unit.alive else "",
        devices=unit.devices if unit and unit.alive else (),
        memory_bytes=unit.memory_bytes if unit and unit.alive else 0,
        memory_used_bytes=control.placer.footprints.used.get((s.id, s.generation), 0) if control.placer else 0,
        misplaced=control.placer.note(s.id) if control.placer else "",
    )
