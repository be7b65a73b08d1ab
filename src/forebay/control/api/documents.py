"""The response documents of the admin API. JSON has no infinity: what is unknown or never happens is null."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from forebay.control.health import documents as node_documents
from forebay.control.journal import JournalEvent
from forebay.control.keyring import state
from forebay.control.placing.rows import PlacedNode
from forebay.control.rolling.values import RolloutStanding
from forebay.control.scaling import values as scaled
from forebay.control.scaling.state import DecisionRecord, Setting
from forebay.core.deploy.course import Kind
from forebay.core.deploy.rollout import ENDED, Phase, Rollout
from forebay.core.rollout.effects import Effect
from forebay.core.rollout.values import Decision, Finding, Part, Verdict
from forebay.core.tenancy import KeyRecord
from forebay.registry.catalogue import Listed
from forebay.registry.uploads.staging import Lacking
from forebay.store.events import Event


@dataclass(frozen=True, slots=True)
class Events:
    """The response of `/v1/events`: events since this controller started."""

    events: tuple[JournalEvent, ...]


@dataclass(frozen=True, slots=True)
class History:
    """The response of `/v1/history`: events of all time."""

    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Revisions:
    """Registered revisions."""

    revisions: tuple[Listed, ...]


@dataclass(frozen=True, slots=True)
class Verified:
    """Whether everything is unmodified, and all that is not."""

    ok: bool
    wrong: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Collected:
    """How much the removal of unused files has freed."""

    freed_bytes: int


@dataclass(frozen=True, slots=True)
class LackingDocument:
    """Files to be uploaded before an artifact can be registered, in parts of at most `part_bytes`."""

    lacking: tuple[Lacking, ...]
    part_bytes: int


@dataclass(frozen=True, slots=True)
class PartDocument:
    """How many bytes of a file are there, from its beginning on: the offset of the next part."""

    have_bytes: int


@dataclass(frozen=True, slots=True)
class KeyDocument:
    """The public data of an API key. Times are seconds since the epoch; null: never."""

    id: str
    tenant: str | None
    """The tenant that the key belongs to; null: it is an admin key."""
    name: str | None
    """The holder of an admin key; null: it is a tenant's."""
    role: str | None
    """The role of an admin key; null: it is a tenant's."""
    state: str
    """`good`, `expired` or `revoked`."""
    created_at: float
    expires_at: float | None
    revoked_at: float | None


@dataclass(frozen=True, slots=True)
class KeyDocuments:
    """All keys of a cluster."""

    keys: tuple[KeyDocument, ...]


@dataclass(frozen=True, slots=True)
class NewKeyDocument:
    """A new key. `key` is shown only once."""

    key: str
    made: KeyDocument


def key(record: KeyRecord, now: float) -> KeyDocument:
    """The public data of a key."""
    return KeyDocument(
        id=record.id,
        tenant=None if record.role else record.tenant,
        name=record.tenant if record.role else None,
        role=record.role or None,
        state=state(record, now),
        created_at=record.created,
        expires_at=record.expires,
        revoked_at=record.revoked,
    )


@dataclass(frozen=True, slots=True)
class NodeDocuments:
    """The response of `/v1/nodes`: state of the nodes, their used resources, and unplaceable slots with the
    reason."""

    nodes: tuple[node_documents.NodeStanding, ...]
    placed: tuple[PlacedNode, ...] = ()
    waits: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepDocument:
    """A step of a rollout: the canary's share of the traffic, and how long it lasts at most."""

    share: float
    time_s: float


@dataclass(frozen=True, slots=True)
class FindingDocument:
    """The result for one property of one metric. `effect`: ratio, odds ratio or difference, as `seen` says."""

    metric: str
    part: str
    finding: Finding
    required: bool
    seen: str
    effect: float | None
    worse_p: float | None
    fine_p: float | None
    canary_samples: int
    needed_samples: float | None
    """Further samples needed for a decision; null: none would suffice at the observed effect."""


@dataclass(frozen=True, slots=True)
class VerdictDocument:
    """What the evidence says so far."""

    decision: Decision
    reason: str
    needed_samples: float | None
    needed_s: float | None
    findings: tuple[FindingDocument, ...]


@dataclass(frozen=True, slots=True)
class EffectDocument:
    """The difference between the arms, with anytime-valid bounds; null: unknown."""

    metric: str
    kind: str
    estimate: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class RolloutDocument:
    """A rollout. Times are in seconds, since the epoch or `_s`; shares are of the model's traffic."""

    id: str
    model: str
    stable: str
    canary: str
    kind: Kind
    phase: Phase
    ended: bool
    step: int
    steps: tuple[StepDocument, ...]
    share: float
    paused: bool
    forced: bool
    why: str
    since: float
    """When the phase, or the current step, began."""
    time_left_s: float | None
    """Of the step or phase, at most; null: it is unlimited or has ended."""
    created_at: float
    created_by: str
    stable_ready: int | None
    canary_ready: int | None
    stable_wanted: int
    canary_wanted: int
    mirrored: float
    samples: int
    """Requests that were compared."""
    verdict: VerdictDocument | None
    effects: tuple[EffectDocument, ...]


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The response of `/v1/rollouts`."""

    rollouts: tuple[RolloutDocument, ...]


def rollouts(standings: Iterable[RolloutStanding], now: float) -> Rollouts:
    """Several rollouts; `now` is wall time."""
    return Rollouts(tuple(rollout(each, now) for each in standings))


def rollout(standing: RolloutStanding, now: float) -> RolloutDocument:
    """The document of a rollout at `now`, wall time."""
    it, wanted = standing.rollout, standing.wanted
    return RolloutDocument(
        id=it.id,
        model=it.model,
        stable=it.stable,
        canary=it.canary,
        kind=it.course.kind,
        phase=it.phase,
        ended=it.phase in ENDED,
        step=it.step,
        steps=tuple(StepDocument(step.share, step.time_s) for step in it.course.steps),
        share=it.share,
        paused=it.paused,
        forced=it.forced,
        why=it.why,
        since=it.since,
        time_left_s=time_left_s(it, now),
        created_at=standing.created_at,
        created_by=standing.created_by,
        stable_ready=standing.stable_ready,
        canary_ready=standing.canary_ready,
        stable_wanted=wanted.stable,
        canary_wanted=wanted.canary,
        mirrored=wanted.mirrored,
        samples=standing.seen,
        verdict=None if standing.verdict is None else _verdict(standing.verdict),
        effects=tuple(_effect(each) for each in standing.effects),
    )


def time_left_s(it: Rollout, now: float) -> float | None:
    """How long the phase, or the current step, lasts at most."""
    match it.phase:
        case Phase.STARTING:
            whole = it.course.start_timeout_s
        case Phase.COMPARING:
            whole = it.course.steps[it.step].time_s
        case Phase.SETTLING:
            whole = it.course.settle_s
        case _:
            return None
    return None if it.paused else max(0.0, round(it.since + whole - now, 1))


def _verdict(verdict: Verdict) -> VerdictDocument:
    return VerdictDocument(
        verdict.decision,
        verdict.reason,
        _finite(verdict.needed_samples),
        _finite(verdict.needed_s),
        tuple(_finding(part) for part in verdict.parts),
    )


def _finding(part: Part) -> FindingDocument:
    return FindingDocument(
        metric=part.metric,
        part=part.part,
        finding=part.finding,
        required=part.required,
        seen=part.seen,
        effect=_finite(part.effect),
        worse_p=_finite(part.worse_p),
        fine_p=_finite(part.fine_p),
        canary_samples=part.canary_samples,
        needed_samples=_finite(part.needed_samples),
    )


def _effect(effect: Effect) -> EffectDocument:
    bounds = (effect.estimate, effect.low, effect.high)
    return EffectDocument(effect.metric, effect.kind, *(_finite(value) for value in bounds))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class ScalingDocument:
    """How many replicas a model has and why. Times are seconds since the epoch, or end in `_s`."""

    model: str
    mode: str
    """`fixed`: not scaled; `auto`; `shadow`: decisions are only reported; `set`: replica count set by an operator."""
    policy: str | None
    replicas: int
    """The count that the controller works towards."""
    wanted: int
    """The count that was decided: differs from `replicas` in shadow mode only."""
    min: int | None
    """The current bounds; null: none, as it is not scaled."""
    max: int | None
    setting: Setting | None
    """What operators have set; null: nothing."""
    cold_start_s: float | None
    """From placing a replica until it is ready, 90th percentile; null: not measured yet."""
    decision: DecisionRecord | None
    """The last decision."""
    trouble: str
    """Why the store is unavailable; empty: it is available."""
    decisions: tuple[DecisionRecord, ...] = ()
    """Recent decisions, newest last; for single models only."""


@dataclass(frozen=True, slots=True)
class Scalings:
    """All models, by name."""

    models: tuple[ScalingDocument, ...]
    limits: tuple[scaled.LimitUse, ...] = ()
    """Use of the limits that all models share; empty: the cluster file has no `limits`."""


def scaling(it: scaled.ScalingStanding, *, all_of_it: bool = False) -> ScalingDocument:
    """The document of a model, with all recent decisions or only the last one."""
    scale = it.scale
    auto = "fixed" if scale is None else "shadow" if scale.shadow else "auto"
    return ScalingDocument(
        model=it.model,
        mode=auto if it.setting.replicas is None else "set",
        policy=None if scale is None else scale.policy.value,
        replicas=it.replicas,
        wanted=it.wanted,
        min=it.min,
        max=it.max,
        setting=None if it.setting.empty else it.setting,
        cold_start_s=it.cold_start_s,
        decision=it.decisions[-1] if it.decisions else None,
        trouble=it.trouble,
        decisions=it.decisions if all_of_it else (),
    )
