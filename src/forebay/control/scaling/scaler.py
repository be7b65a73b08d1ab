"""The replica count of each model: decided from the reports of gateways and replicas, about once a second.

Decisions take effect at once, and are stored by a separate task. Operator settings take precedence. While gateways
are silent, or a rollout is active, nothing is scaled down.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from forebay.control.plan import Plan, PlannedModel
from forebay.control.scaling.collecting import Collected, Collector, PressureSource
from forebay.control.scaling.limiting import Decided, Limiter, Share, claim_of
from forebay.control.scaling.reading import Look, make_reading
from forebay.control.scaling.sizing import Size, Sizer
from forebay.control.scaling.starts import Starts, cold_start_s, with_start
from forebay.control.scaling.state import DecisionRecord, ScalingState, Setting
from forebay.control.scaling.storing import ScalingStore
from forebay.control.scaling.values import LimitUse, ScaleRefused, ScalingRequest, ScalingStanding
from forebay.core.reconcile import Move, ObservedUnit
from forebay.core.scaling.decide import bounds, decide
from forebay.core.scaling.limits import gpus_of
from forebay.core.scaling.schedule import Hours
from forebay.core.scaling.settings import REPLICAS_MAX, Scale
from forebay.core.scaling.sharing import GPU
from forebay.core.scaling.values import Decision, Reason
from forebay.obs.clock import wall_s
from forebay.obs.metrics import Metrics
from forebay.store.access import RunBlocking
from forebay.store.database import StoreError
from forebay.store.documents import Changed, Documents, Kept

READ_EVERY_S: Final = 1.0
"""How often gateways are polled."""
WAKE_EVERY_S: Final = 0.2
"""How often while a model has no replica: a request may wait for one."""
CONTROL: Final = "control"
SET: Final = "set"
"""The reason of a count set by an operator."""


class Scaler:
    """The scaling state of every model. `recall`: a file for a start while the store is down."""

    def __init__(
        self,
        records: Documents,
        run: RunBlocking,
        *,
        note: Callable[[str, str], None],
        metrics: Metrics,
        recall: Path | None = None,
    ) -> None:
        self._store = ScalingStore(records, run, note, recall)
        self._note = note
        self._metrics = metrics
        self._collector = Collector()
        self._sizer = Sizer()
        self._limiter = Limiter()
        self._pools: Mapping[str, int] = {}
        self._starts = Starts()
        self._planned: dict[str, PlannedModel] = {}
        """As declared in the cluster file."""
        self._models: dict[str, ScalingState] = {}
        self._stored: Mapping[str, Kept] = {}
        self._collected: Collected | None = None
        self._due = False
        self._next_at = float("-inf")
        self._asleep = False
        """Whether any model has no replica."""
        self._settings_known = True
        """Whether operator settings are known; if not, nothing is scaled down."""
        self._wake: Callable[[], None] = lambda: None

    @property
    def trouble(self) -> str:
        """Why the store is unavailable; empty: it is available."""
        return self._store.trouble

    @property
    def look_again_s(self) -> float:
        """When the next round is due at the latest."""
        return WAKE_EVERY_S if self._asleep else math.inf

    @property
    def limits(self) -> tuple[LimitUse, ...]:
        """The use of the cluster's limits; empty: there are none."""
        return self._limiter.uses

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    async def begin(self) -> None:
        """Load the stored state; while the store is down, the running replicas count as wanted."""
        self._models.clear()
        try:
            self._stored = await self._store.known()
        except StoreError:
            recalled = self._store.recalled()
            self._stored, self._settings_known = recalled or {}, recalled is not None

    async def run(self, wake: Callable[[], None]) -> None:
        """Store changes until cancelled; `wake` requests a round."""
        self._wake = wake

        def take(stored: Mapping[str, Kept]) -> None:
            self._merge_stored(stored)
            wake()

        await self._store.follow(lambda: tuple(self._models.values()), take)

    async def collect(self, source: PressureSource, units: Iterable[ObservedUnit], plan: Plan) -> None:
        """Poll the gateways if due, and if any model is scaled."""
        now = asyncio.get_running_loop().time()
        self._due = now >= self._next_at
        if not self._due or not any(self._is_scaled(model) for model in plan.models):
            return
        self._next_at = now + min(READ_EVERY_S, self.look_again_s)
        gateways = [slot.id for slot in plan.gateways]
        self._collected = await self._collector.collect(source, units, gateways)

    def sized(self, plan: Plan, look: Look) -> Plan:
        """The plan with the replica counts wanted now."""
        self._planned = {model.routes.name: model for model in plan.models}
        for gone in sorted(self._models.keys() - self._planned.keys()):
            state = self._models.pop(gone)
            self._stored = {**self._stored, gone: Kept(state.text(), state.version)}  # in case it comes back
            self._forget_metrics(gone)
        self._pools = look.pools
        decided, sizes = {}, {}
        for name, model in self._planned.items():
            if name not in self._models:
                self._models[name] = self._restored(model, look)
            found = self._decide(self._models[name], model, look) if self._due else None
            if found is not None:
                decided[name] = found
        for name, share in self._shares(plan, decided).items():
            self._settle(self._models[name], self._planned[name], decided[name], share)
        for name, model in self._planned.items():
            size = self._size(self._models[name], model)
            if size is not None:
                sizes[name] = size
        self._due = False
        self._asleep = any(size.replicas == 0 for size in sizes.values())
        return self._sizer.sized(plan, sizes)

    def see(self, moves: Iterable[Move], plan: Plan, now: float) -> None:
        """Learn start times from the moves of slots; `now`: when they were observed, on the loop's clock."""
        done = self._starts.look(moves, now)
        if not done:
            return
        revisions = {slot.id: getattr(slot.spec, "revision", "") for model in plan.models for slot in model.units}
        for name, slot, seconds in done:
            state, revision = self._models.get(name), revisions.get(slot)
            if state is not None and revision:
                state.starts = with_start(state.starts, revision, seconds)

    async def set(self, request: ScalingRequest, actor: str) -> ScalingStanding:
        """Apply an operator's request. Raises `ScaleRefused`; takes effect even while the store is down."""
        model, state = self._planned.get(request.model), self._models.get(request.model)
        if model is None or state is None:
            known = ", ".join(sorted(self._planned))
            raise ScaleRefused(f"there is no model {request.model}; there is: {known}", "model")
        setting = Setting(request.replicas, request.min, request.max, actor, wall_s(), request.why)
        _check(model, setting)
        self._check_limits(state, model, setting)
        state.setting = setting
        figures = {"replicas": request.replicas, "min": request.min, "max": request.max}
        kind = "scale.auto" if setting.empty else "scale.set"
        state.changed.append(Changed(kind, setting.at, actor, state.subject, request.why, figures))
        self._note(kind, f"{request.model}: {_in_words(setting) or 'as its load wants'} (by {actor})")
        self._next_at = float("-inf")
        self._wake()
        try:
            await self._store.keep(state)
        except StoreError:
            self._store.hurry()
        return self._standing(model, state)

    def standing(self, name: str | None = None) -> tuple[ScalingStanding, ...]:
        """The status of models, by name; one, or all."""
        return tuple(
            self._standing(model, state)
            for each, model in sorted(self._planned.items())
            if name in (None, each) and (state := self._models.get(each)) is not None
        )

    def bounds(self, name: str) -> tuple[int, int] | None:
        """The current minimum and maximum of a model; None: it is not scaled."""
        model, state = self._planned.get(name), self._models.get(name)
        scale = _rules(model, state.setting) if model is not None and state is not None else None
        return None if scale is None else bounds(scale, wall_s())

    def _standing(self, model: PlannedModel, state: ScalingState) -> ScalingStanding:
        scale = _rules(model, state.setting)
        low, high = bounds(scale, wall_s()) if scale is not None else (None, None)
        size = self._size(state, model)
        return ScalingStanding(
            model=state.model,
            scale=scale,
            setting=state.setting,
            replicas=size.replicas if size is not None else len(model.slots),
            wanted=state.wanted if state.wanted is not None else len(model.slots),
            min=low,
            max=high,
            cold_start_s=cold_start_s(state.starts, model.routes.revision),
            decisions=tuple(state.decisions),
            trouble=self.trouble,
        )

    def _is_scaled(self, model: PlannedModel) -> bool:
        state = self._models.get(model.routes.name)
        return model.scale is not None or (state is not None and not state.setting.empty)

    def _restored(self, model: PlannedModel, look: Look) -> ScalingState:
        """Restore a model's state; without any, the running replicas count as wanted, so that none is removed
        blindly."""
        state, name = ScalingState(model.routes.name), model.routes.name
        kept = self._stored.get(name)
        if kept is not None:
            state.take(kept.text)
            state.version = kept.version
        if state.wanted is None and model.scale is not None and not model.scale.shadow:
            state.wanted = min(max(len(model.slots), look.running(name)), model.scale.most)
        return state

    def _merge_stored(self, stored: Mapping[str, Kept]) -> None:
        """The store has become readable. What was learned in the meantime is newer; stored operator settings
        count."""
        self._stored, self._settings_known = stored, True
        for name, state in sorted(self._models.items()):
            kept = stored.get(name)
            if kept is None:
                continue
            old = ScalingState(name)
            old.take(kept.text)
            state.version = kept.version
            state.starts = {**old.starts, **state.starts}
            if old.setting.at > state.setting.at:
                state.setting = old.setting

    def _decide(self, state: ScalingState, model: PlannedModel, look: Look) -> Decided | None:
        """Decide the count of a model on its own; None: as in the cluster file."""
        scale, now, several = _rules(model, state.setting), wall_s(), state.setting.replicas
        if several is not None:
            return Decided(several, SET, _in_words(state.setting), {}, least=several)
        if scale is None:
            if state.wanted is not None:
                state.wanted = state.asked = None
                self._forget_metrics(state.model)
            return None
        before = next((many for many in (state.asked, state.wanted) if many is not None), len(model.slots))
        start_s = cold_start_s(state.starts, model.routes.revision)
        gpus = gpus_of(model.placement) / GPU
        reading = make_reading(state.model, model.slo, self._collected, look, at=now, cold_start_s=start_s, gpus=gpus)
        decision, state.autoscaler = decide(scale, state.autoscaler, reading, now, current=before)
        low, high = bounds(scale, now)
        if state.model in look.rolling:  # a rollback needs the old revision's replicas
            decision = _at_least(decision, min(before, high), "a rollout is under way")
        if not self._settings_known:
            decision = _at_least(decision, before, "the operator settings are not known")
        held = reading is None or state.model in look.rolling or not self._settings_known
        return Decided(
            decision.wanted, decision.reason, decision.why, decision.figures, low, held=held, shadow=scale.shadow
        )

    def _shares(self, plan: Plan, decided: Mapping[str, Decided]) -> dict[str, Share]:
        """Apply the `limits` of the cluster file to the decisions."""
        if not decided:
            return {}
        claims = [
            claim_of(self._models[name], model, decided.get(name), self._pools.get(name, 0))
            for name, model in self._planned.items()
        ]
        asked = {name: each.asked for name, each in decided.items()}
        return self._limiter.share(plan.limits, claims, asked)

    def _settle(self, state: ScalingState, model: PlannedModel, decided: Decided, share: Share) -> None:
        """Apply and report the decision."""
        before, wanted = len(model.slots) if state.wanted is None else state.wanted, decided.asked
        reason, why, figures = str(decided.reason), decided.why, dict(decided.figures)
        limited = share.why_not != "" and not decided.shadow
        if limited:
            wanted, reason = share.replicas, str(Reason.LIMIT)
            why = f"{why}; {decided.asked} would do, but {share.why_not}"
            figures["asked"] = decided.asked
        state.wanted, state.asked = wanted, decided.asked
        self._metrics.gauge("scale_wanted", state.model).set(wanted)
        self._metrics.gauge("scale_asked", state.model).set(decided.asked)
        known = {name: round(float(value), 4) for name, value in figures.items() if math.isfinite(value)}
        now, news = wall_s(), limited and (not state.decisions or state.decisions[-1].reason != Reason.LIMIT)
        record = DecisionRecord(now, now, before, wanted, reason, why, known, done=not decided.shadow)
        state.record(record)
        if wanted != before:
            self._metrics.counter("scale_decisions_total", state.model, record.reason).inc()
            kind = "scale.changed" if record.done else "scale.would_change"
            self._write(
                state, record, kind, f"{record.before} → {record.wanted} replicas ({record.reason}): {record.why}"
            )
        elif news:
            self._write(state, record, "scale.limited", record.why)

    def _forget_metrics(self, model: str) -> None:
        for name in ("scale_wanted", "scale_asked"):
            self._metrics.forget(name, model)

    def _check_limits(self, state: ScalingState, model: PlannedModel, setting: Setting) -> None:
        """Raises `ScaleRefused` if a setting does not fit within the limits beside the minimums of the others."""
        several = setting.min if setting.replicas is None else setting.replicas
        if several is not None:
            request = Decided(several, SET, "", {}, least=several)
            claim = claim_of(state, model, request, self._pools.get(state.model, 0))
            self._limiter.check(claim, "min" if setting.replicas is None else "replicas")

    def _write(self, state: ScalingState, record: DecisionRecord, kind: str, text: str) -> None:
        """Record an event in the history and the log."""
        self._note(kind, f"{state.model}: {text}")
        document = {
            "before": record.before,
            "wanted": record.wanted,
            "reason": record.reason,
            "figures": record.figures,
        }
        state.changed.append(Changed(kind, record.at, CONTROL, state.subject, text, document))
        self._store.hurry()

    def _size(self, state: ScalingState, model: PlannedModel) -> Size | None:
        """The size of a model; None: as in the cluster file."""
        scale = _rules(model, state.setting)
        if scale is None and state.setting.replicas is None:
            return None
        shadow = scale is not None and scale.shadow and state.setting.replicas is None
        several = len(model.slots) if shadow or state.wanted is None else state.wanted
        may_be_none = not shadow and scale is not None and _least(scale) == 0
        start_s = cold_start_s(state.starts, model.routes.revision)
        return Size(several, may_be_none or several == 0, float(math.ceil(start_s or 0.0)))


def _rules(model: PlannedModel, setting: Setting) -> Scale | None:
    """The scaling rules of a model: bounds set by operators replace those of the file and of its schedule.

    A bound that is not set stays, but yields to the other if they conflict.
    """
    scale = model.scale
    if scale is None or (setting.min is None and setting.max is None):
        return scale
    low, high = _set_bounds(scale, setting)
    hours = tuple(_hours_within(each, setting) for each in scale.schedule)
    return replace(scale, min=min(low, high), max=high, schedule=hours)


def _hours_within(hours: Hours, setting: Setting) -> Hours:
    """A schedule's bounds, adjusted to operator settings."""
    low = hours.min if setting.min is None else None
    high = hours.max if setting.max is None else None
    if low is not None and setting.max is not None:
        low = min(low, setting.max)
    if high is not None and setting.min is not None:
        high = max(high, setting.min)
    return hours._replace(min=low, max=high)


def _set_bounds(scale: Scale, setting: Setting) -> tuple[int, int]:
    return (
        scale.min if setting.min is None else setting.min,
        scale.max if setting.max is None else setting.max,
    )


def _least(scale: Scale) -> int:
    return min([scale.min, *(hours.min for hours in scale.schedule if hours.min is not None)])


def _at_least(decision: Decision, least: int, but: str) -> Decision:
    """The decision, with that many replicas at the least; `but` says why."""
    if decision.wanted >= least:
        return decision
    why = f"{decision.why}; {decision.wanted} would do, but {but}"
    return replace(decision, wanted=least, reason=Reason.WAIT, why=why)


def _check(model: PlannedModel, setting: Setting) -> None:
    """Raises `ScaleRefused` for invalid settings."""
    scale = model.scale
    if scale is None and (setting.min is not None or setting.max is not None):
        raise ScaleRefused(f"{model.routes.name} has no `scale` in the cluster file, so it has no bounds", "min")
    if scale is not None:
        low, high = _set_bounds(scale, setting)
        if low > high:
            raise ScaleRefused(f"min would be {low}, and max {high}", "max" if setting.min is None else "min")
    if setting.replicas is None:
        return
    rules = _rules(model, setting)
    low, high = (_least(rules), rules.most) if rules is not None else (1, REPLICAS_MAX)
    if not low <= setting.replicas <= high:
        text = f"{setting.replicas} replicas are outside {low} to {high}; change the bounds with `--min` and `--max`"
        raise ScaleRefused(text if rules is not None else f"at least {low}, at most {high} replicas", "replicas")


def _in_words(setting: Setting) -> str:
    """What operators have set, and who."""
    named = (("replicas", setting.replicas), ("min", setting.min), ("max", setting.max))
    listed = ", ".join(f"{name} {value}" for name, value in named if value is not None)
    return f"{listed} set by {setting.by}{f': {setting.why}' if setting.why else ''}" if listed else ""
