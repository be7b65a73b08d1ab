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
from forebay.control.rolling.values import Run
from forebay.control.scaling.book import Book
from forebay.control.scaling.collecting import Collected, Collector, PressureSource
from forebay.control.scaling.kept import Scaled, Setting, Told
from forebay.control.scaling.limiting import Decided, Limiter, Share, claim_of
from forebay.control.scaling.reading import Look, make_reading
from forebay.control.scaling.sizing import Size, Sizer
from forebay.control.scaling.starts import Starts, cold_start_s, with_start
from forebay.control.scaling.values import LimitUse, ScaleRefused, ScalingRequest, Standing
from forebay.core.reconcile import Move, ObservedUnit
from forebay.core.scaling.decide import bounds, decide
from forebay.core.scaling.limits import gpus_of
from forebay.core.scaling.schedule import Hours
from forebay.core.scaling.settings import REPLICAS_MAX, Scale
from forebay.core.scaling.sharing import GPU
from forebay.core.scaling.values import Decision, Reason
from forebay.obs.clock import wall_s
from forebay.obs.metrics import Metrics
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
        run: Run,
        *,
        note: Callable[[str, str], None],
        metrics: Metrics,
        recall: Path | None = None,
    ) -> None:
        self._book = Book(records, run, note, recall)
        self._note = note
        self._metrics = metrics
        self._collector = Collector()
        self._sizer = Sizer()
        self._limiter = Limiter()
        self._pools: Mapping[str, int] = {}
        self._starts = Starts()
        self._planned: dict[str, PlannedModel] = {}
        """As declared in the cluster file."""
        self._models: dict[str, Scaled] = {}
        self._stored: Mapping[str, Kept] = {}
        self._collected: Collected | None = None
        self._due = False
        self._next_at = float("-inf")
        self._asleep = False
        """Whether any model has no replica."""
        self._sure = True
        """Whether operator settings are known; if not, nothing is scaled down."""
        self._wake: Callable[[], None] = lambda: None

    @property
    def trouble(self) -> str:
        """Why the store is unavailable; empty: it is available."""
        return self._book.trouble

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
        self._book.close()

    async def begin(self) -> None:
        """Load the stored state; while the store is down, the running replicas count as wanted."""
        self._models.clear()
        try:
            self._stored = await self._book.known()
        except StoreError:
            recalled = self._book.recalled()
            self._stored, self._sure = recalled or {}, recalled is not None

    async def run(self, wake: Callable[[], None]) -> None:
        """Store changes until cancelled; `wake` requests a round."""
        self._wake = wake

        def take(stored: Mapping[str, Kept]) -> None:
            self._take_late(stored)
            wake()

        await self._book.follow(lambda: tuple(self._models.values()), take)

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
            it = self._models.pop(gone)
            self._stored = {**self._stored, gone: Kept(it.text(), it.version)}  # in case it comes back
            self._forget_metrics(gone)
        self._pools = look.pools
        decided, sizes = {}, {}
        for name, model in self._planned.items():
            if name not in self._models:
                self._models[name] = self._begun(model, look)
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
            it, revision = self._models.get(name), revisions.get(slot)
            if it is not None and revision:
                it.starts = with_start(it.starts, revision, seconds)

    async def set(self, request: ScalingRequest, actor: str) -> Standing:
        """Apply an operator's request. Raises `ScaleRefused`; takes effect even while the store is down."""
        model, it = self._planned.get(request.model), self._models.get(request.model)
        if model is None or it is None:
            there = ", ".join(sorted(self._planned))
            raise ScaleRefused(f"there is no model {request.model}; there is: {there}", "model")
        setting = Setting(request.replicas, request.min, request.max, actor, wall_s(), request.why)
        _check(model, setting)
        self._check_limits(it, model, setting)
        it.setting = setting
        figures = {"replicas": request.replicas, "min": request.min, "max": request.max}
        kind = "scale.auto" if setting.empty else "scale.set"
        it.changed.append(Changed(kind, setting.at, actor, it.subject, request.why, figures))
        self._note(kind, f"{request.model}: {_in_words(setting) or 'as its load wants'} (by {actor})")
        self._next_at = float("-inf")
        self._wake()
        try:
            await self._book.keep(it)
        except StoreError:
            self._book.hurry()
        return self._standing(model, it)

    def standing(self, name: str | None = None) -> tuple[Standing, ...]:
        """The status of models, by name; one, or all."""
        return tuple(
            self._standing(model, it)
            for each, model in sorted(self._planned.items())
            if name in (None, each) and (it := self._models.get(each)) is not None
        )

    def bounds(self, name: str) -> tuple[int, int] | None:
        """The current minimum and maximum of a model; None: it is not scaled."""
        model, it = self._planned.get(name), self._models.get(name)
        scale = _rules(model, it.setting) if model is not None and it is not None else None
        return None if scale is None else bounds(scale, wall_s())

    def _standing(self, model: PlannedModel, it: Scaled) -> Standing:
        scale = _rules(model, it.setting)
        low, high = bounds(scale, wall_s()) if scale is not None else (None, None)
        size = self._size(it, model)
        return Standing(
            model=it.model,
            scale=scale,
            setting=it.setting,
            replicas=size.replicas if size is not None else len(model.slots),
            wanted=it.wanted if it.wanted is not None else len(model.slots),
            min=low,
            max=high,
            cold_start_s=cold_start_s(it.starts, model.routes.revision),
            told=tuple(it.told),
            trouble=self.trouble,
        )

    def _is_scaled(self, model: PlannedModel) -> bool:
        it = self._models.get(model.routes.name)
        return model.scale is not None or (it is not None and not it.setting.empty)

    def _begun(self, model: PlannedModel, look: Look) -> Scaled:
        """Restore a model's state; without any, the running replicas count as wanted, so that none is removed
        blindly."""
        it, name = Scaled(model.routes.name), model.routes.name
        kept = self._stored.get(name)
        if kept is not None:
            it.take(kept.text)
            it.version = kept.version
        if it.wanted is None and model.scale is not None and not model.scale.shadow:
            it.wanted = min(max(len(model.slots), look.running(name)), model.scale.most)
        return it

    def _take_late(self, stored: Mapping[str, Kept]) -> None:
        """The store has become readable. What was learned in the meantime is newer; stored operator settings
        count."""
        self._stored, self._sure = stored, True
        for name, it in sorted(self._models.items()):
            kept = stored.get(name)
            if kept is None:
                continue
            old = Scaled(name)
            old.take(kept.text)
            it.version = kept.version
            it.starts = {**old.starts, **it.starts}
            if old.setting.at > it.setting.at:
                it.setting = old.setting

    def _decide(self, it: Scaled, model: PlannedModel, look: Look) -> Decided | None:
        """Decide the count of a model on its own; None: as in the cluster file."""
        scale, now, several = _rules(model, it.setting), wall_s(), it.setting.replicas
        if several is not None:
            return Decided(several, SET, _in_words(it.setting), {}, least=several)
        if scale is None:
            if it.wanted is not None:
                it.wanted = it.asked = None
                self._forget_metrics(it.model)
            return None
        before = next((many for many in (it.asked, it.wanted) if many is not None), len(model.slots))
        start_s = cold_start_s(it.starts, model.routes.revision)
        gpus = gpus_of(model.placement) / GPU
        reading = make_reading(it.model, model.slo, self._collected, look, at=now, cold_start_s=start_s, gpus=gpus)
        decision, it.memory = decide(scale, it.memory, reading, now, current=before)
        low, high = bounds(scale, now)
        if it.model in look.rolling:  # a rollback needs the old revision's replicas
            decision = _kept(decision, min(before, high), "a rollout is under way")
        if not self._sure:
            decision = _kept(decision, before, "the operator settings are not known")
        held = reading is None or it.model in look.rolling or not self._sure
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

    def _settle(self, it: Scaled, model: PlannedModel, decided: Decided, share: Share) -> None:
        """Apply and report the decision."""
        before, wanted = len(model.slots) if it.wanted is None else it.wanted, decided.asked
        reason, why, figures = str(decided.reason), decided.why, dict(decided.figures)
        limited = share.why_not != "" and not decided.shadow
        if limited:
            wanted, reason = share.replicas, str(Reason.LIMIT)
            why = f"{why}; {decided.asked} would do, but {share.why_not}"
            figures["asked"] = decided.asked
        it.wanted, it.asked = wanted, decided.asked
        self._metrics.gauge("scale_wanted", it.model).set(wanted)
        self._metrics.gauge("scale_asked", it.model).set(decided.asked)
        known = {name: round(float(value), 4) for name, value in figures.items() if math.isfinite(value)}
        now, news = wall_s(), limited and (not it.told or it.told[-1].reason != Reason.LIMIT)
        told = Told(now, now, before, wanted, reason, why, known, done=not decided.shadow)
        it.tell(told)
        if wanted != before:
            self._metrics.counter("scale_decisions_total", it.model, told.reason).inc()
            kind = "scale.changed" if told.done else "scale.would_change"
            self._write(it, told, kind, f"{told.before} → {told.wanted} replicas ({told.reason}): {told.why}")
        elif news:
            self._write(it, told, "scale.limited", told.why)

    def _forget_metrics(self, model: str) -> None:
        for name in ("scale_wanted", "scale_asked"):
            self._metrics.forget(name, model)

    def _check_limits(self, it: Scaled, model: PlannedModel, setting: Setting) -> None:
        """Raises `ScaleRefused` if a setting does not fit within the limits beside the minimums of the others."""
        several = setting.min if setting.replicas is None else setting.replicas
        if several is not None:
            request = Decided(several, SET, "", {}, least=several)
            claim = claim_of(it, model, request, self._pools.get(it.model, 0))
            self._limiter.check(claim, "min" if setting.replicas is None else "replicas")

    def _write(self, it: Scaled, told: Told, kind: str, text: str) -> None:
        """Record an event in the history and the log."""
        self._note(kind, f"{it.model}: {text}")
        document = {"before": told.before, "wanted": told.wanted, "reason": told.reason, "figures": told.figures}
        it.changed.append(Changed(kind, told.at, CONTROL, it.subject, text, document))
        self._book.hurry()

    def _size(self, it: Scaled, model: PlannedModel) -> Size | None:
        """The size of a model; None: as in the cluster file."""
        scale = _rules(model, it.setting)
        if scale is None and it.setting.replicas is None:
            return None
        shadow = scale is not None and scale.shadow and it.setting.replicas is None
        several = len(model.slots) if shadow or it.wanted is None else it.wanted
        may_be_none = not shadow and scale is not None and _least(scale) == 0
        start_s = cold_start_s(it.starts, model.routes.revision)
        return Size(several, may_be_none or several == 0, float(math.ceil(start_s or 0.0)))


def _rules(model: PlannedModel, setting: Setting) -> Scale | None:
    """The scaling rules of a model: bounds set by operators replace those of the file and of its schedule.

    A bound that is not set stays, but yields to the other if they conflict.
    """
    scale = model.scale
    if scale is None or (setting.min is None and setting.max is None):
        return scale
    low, high = _set_bounds(scale, setting)
    hours = tuple(_under(each, setting) for each in scale.schedule)
    return replace(scale, min=min(low, high), max=high, schedule=hours)


def _under(hours: Hours, setting: Setting) -> Hours:
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


def _kept(decision: Decision, least: int, but: str) -> Decision:
    """At least that many."""
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
    told = ", ".join(f"{name} {value}" for name, value in named if value is not None)
    return f"{told} set by {setting.by}{f': {setting.why}' if setting.why else ''}" if told else ""
