"""How many replicas each model is to have: decided from what gateways and replicas say, about once a second.

What is decided is done at once, and written down by a task of its own. What people have set goes before everything.
While gateways are silent nothing is taken away; while a rollout is under way neither.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from forebay.control.plan import Plan, PlannedModel
from forebay.control.rolling.nouns import Run
from forebay.control.scaling.book import Book
from forebay.control.scaling.collecting import Asker, Collected, Collector
from forebay.control.scaling.kept import Scaled, Setting, Told
from forebay.control.scaling.nouns import ScaleRefused, Standing, Wish
from forebay.control.scaling.reading import Look, make_reading
from forebay.control.scaling.sizing import Size, Sizer
from forebay.control.scaling.starts import Starts, cold_start_s, with_start
from forebay.core.reconcile import Move, SeenUnit
from forebay.core.scaling.decide import bounds, decide
from forebay.core.scaling.settings import REPLICAS_MAX, Scale
from forebay.core.scaling.values import Decision, Reason
from forebay.obs.clock import wall_s
from forebay.obs.metrics import Metrics
from forebay.store.database import StoreError
from forebay.store.scales import Changed, Kept, Scales

READ_EVERY_S: Final = 1.0
"""How often gateways are asked."""
WAKE_EVERY_S: Final = 0.2
"""How often while a model has no replica: a request may wait for one."""
CONTROL: Final = "control"
SET: Final = "set"
"""The reason of what people have set."""


class Scaler:
    """Remembers of every model what it has and why. `recall` is a file for a start while the store is down."""

    def __init__(
        self,
        records: Scales,
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
        self._starts = Starts()
        self._planned: dict[str, PlannedModel] = {}
        """As their file has them."""
        self._models: dict[str, Scaled] = {}
        self._stored: Mapping[str, Kept] = {}
        self._collected: Collected | None = None
        self._due = False
        self._next_at = float("-inf")
        self._asleep = False
        """Whether any model has no replica."""
        self._sure = True
        """Whether it is known what people have set; if not, nothing is taken away."""
        self._wake: Callable[[], None] = lambda: None

    @property
    def trouble(self) -> str:
        """Why the store cannot be used; empty: it can."""
        return self._book.trouble

    @property
    def look_again_s(self) -> float:
        """When the next round should be, at the latest."""
        return WAKE_EVERY_S if self._asleep else math.inf

    def close(self) -> None:
        """Let go of the store."""
        self._book.close()

    async def begin(self) -> None:
        """Take up what is stored; while the store is down, what runs is what is wanted."""
        self._models.clear()
        try:
            self._stored = await self._book.known()
        except StoreError:
            recalled = self._book.recalled()
            self._stored, self._sure = recalled or {}, recalled is not None

    async def run(self, wake: Callable[[], None]) -> None:
        """Write down what changes, until cancelled; `wake` asks for a round."""
        self._wake = wake

        def take(stored: Mapping[str, Kept]) -> None:
            self._take_late(stored)
            wake()

        await self._book.follow(lambda: tuple(self._models.values()), take)

    async def collect(self, asker: Asker, units: Iterable[SeenUnit], plan: Plan) -> None:
        """Ask gateways, if it is time to, and if any model is scaled."""
        now = asyncio.get_running_loop().time()
        self._due = now >= self._next_at
        if not self._due or not any(self._is_scaled(model) for model in plan.models):
            return
        self._next_at = now + min(READ_EVERY_S, self.look_again_s)
        gateways = [slot.id for slot in plan.gateways]
        self._collected = await self._collector.collect(asker, units, gateways)

    def sized(self, plan: Plan, look: Look) -> Plan:
        """The plan with as many replicas as are wanted now."""
        self._planned = {model.routes.name: model for model in plan.models}
        for gone in sorted(self._models.keys() - self._planned.keys()):
            it = self._models.pop(gone)
            self._stored = {**self._stored, gone: Kept(it.text(), it.version)}  # should it come back
            self._metrics.forget("scale_wanted", gone)
        sizes = {}
        for name, model in self._planned.items():
            if name not in self._models:
                self._models[name] = self._begun(model, look)
            it = self._models[name]
            if self._due:
                self._decide(it, model, look)
            size = self._size(it, model)
            if size is not None:
                sizes[name] = size
        self._due = False
        self._asleep = any(size.replicas == 0 for size in sizes.values())
        return self._sizer.sized(plan, sizes)

    def see(self, moves: Iterable[Move], plan: Plan, now: float) -> None:
        """Learn from what has become of slots; `now` is the time at which they were seen, on the loop's clock."""
        done = self._starts.look(moves, now)
        if not done:
            return
        revisions = {slot.id: getattr(slot.spec, "revision", "") for model in plan.models for slot in model.units}
        for name, slot, seconds in done:
            it, revision = self._models.get(name), revisions.get(slot)
            if it is not None and revision:
                it.starts = with_start(it.starts, revision, seconds)

    async def set(self, wish: Wish, actor: str) -> Standing:
        """What people want of a model. Raises `ScaleRefused`; a store that is down is no reason not to do it."""
        model, it = self._planned.get(wish.model), self._models.get(wish.model)
        if model is None or it is None:
            there = ", ".join(sorted(self._planned))
            raise ScaleRefused(f"there is no model {wish.model}; there is: {there}", "model")
        setting = Setting(wish.replicas, wish.min, wish.max, actor, wall_s(), wish.why)
        _check(model, setting)
        it.setting = setting
        figures = {"replicas": wish.replicas, "min": wish.min, "max": wish.max}
        kind = "scale.auto" if setting.empty else "scale.set"
        it.changed.append(Changed(kind, setting.at, actor, wish.why, figures))
        self._note(kind, f"{wish.model}: {_in_words(setting) or 'as its load wants'} (by {actor})")
        self._next_at = float("-inf")
        self._wake()
        try:
            await self._book.keep(it)
        except StoreError:
            self._book.hurry()
        return self._standing(model, it)

    def standing(self, name: str | None = None) -> tuple[Standing, ...]:
        """Where models stand, by name; one, or all."""
        return tuple(
            self._standing(model, it)
            for each, model in sorted(self._planned.items())
            if name in (None, each) and (it := self._models.get(each)) is not None
        )

    def bounds(self, name: str) -> tuple[int, int] | None:
        """The fewest and the most replicas of a model now; None: it is not scaled."""
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
        """What was stored of it; nothing: what runs is wanted, so that nobody is taken away who is not known."""
        it, name = Scaled(model.routes.name), model.routes.name
        kept = self._stored.get(name)
        if kept is not None:
            it.take(kept.text)
            it.version = kept.version
        if it.wanted is None and model.scale is not None and not model.scale.shadow:
            it.wanted = min(max(len(model.slots), look.running(name)), model.scale.most)
        return it

    def _take_late(self, stored: Mapping[str, Kept]) -> None:
        """The store can be read at last. What was learned in the meantime is newer; what people had set counts."""
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

    def _decide(self, it: Scaled, model: PlannedModel, look: Look) -> None:
        """Look at a model once more, and tell what comes of it."""
        scale, now, several = _rules(model, it.setting), wall_s(), it.setting.replicas
        if scale is None and several is None:
            if it.wanted is not None:
                it.wanted = None
                self._metrics.forget("scale_wanted", it.model)
            return
        before = len(model.slots) if it.wanted is None else it.wanted
        shadow = scale is not None and scale.shadow and several is None
        if several is not None:
            wanted, reason, why = several, SET, _in_words(it.setting)
            figures: Mapping[str, float] = {}
        else:
            assert scale is not None
            start_s = cold_start_s(it.starts, model.routes.revision)
            reading = make_reading(it.model, model.slo, self._collected, look, at=now, cold_start_s=start_s)
            decision, it.memory = decide(scale, it.memory, reading, now, current=before)
            if it.model in look.rolling:  # who goes back to the old revision finds all that were there
                decision = _kept(decision, min(before, bounds(scale, now)[1]), "a rollout is under way")
            if not self._sure:
                decision = _kept(decision, before, "it is not known what people have set")
            wanted, reason, why, figures = decision.wanted, decision.reason, decision.why, decision.figures
        it.wanted = wanted
        self._metrics.gauge("scale_wanted", it.model).set(wanted)
        known = {name: round(float(value), 4) for name, value in figures.items() if math.isfinite(value)}
        told = Told(now, now, before, wanted, str(reason), why, known, done=not shadow)
        it.tell(told)
        if wanted != before:
            self._changed(it, told)

    def _changed(self, it: Scaled, told: Told) -> None:
        """Another number of replicas: for the history, the log and the metrics."""
        self._metrics.counter("scale_decisions_total", it.model, told.reason).inc()
        kind = "scale.changed" if told.done else "scale.would_change"
        text = f"{told.before} → {told.wanted} replicas ({told.reason}): {told.why}"
        self._note(kind, f"{it.model}: {text}")
        document = {"before": told.before, "wanted": told.wanted, "reason": told.reason, "figures": told.figures}
        it.changed.append(Changed(kind, told.at, CONTROL, text, document))
        self._book.hurry()

    def _size(self, it: Scaled, model: PlannedModel) -> Size | None:
        """What a model gets; None: what its file says."""
        scale = _rules(model, it.setting)
        if scale is None and it.setting.replicas is None:
            return None
        shadow = scale is not None and scale.shadow and it.setting.replicas is None
        several = len(model.slots) if shadow or it.wanted is None else it.wanted
        may_be_none = not shadow and scale is not None and _least(scale) == 0
        start_s = cold_start_s(it.starts, model.routes.revision)
        return Size(several, may_be_none or several == 0, float(math.ceil(start_s or 0.0)))


def _rules(model: PlannedModel, setting: Setting) -> Scale | None:
    """How a model is scaled, with the bounds that people have set in the place of those of its file and schedule."""
    scale = model.scale
    if scale is None or (setting.min is None and setting.max is None):
        return scale
    low, high = _set_bounds(scale, setting)
    return replace(scale, min=min(low, high), max=high, schedule=())


def _set_bounds(scale: Scale, setting: Setting) -> tuple[int, int]:
    return (
        scale.min if setting.min is None else setting.min,
        scale.max if setting.max is None else setting.max,
    )


def _least(scale: Scale) -> int:
    return min([scale.min, *(hours.min for hours in scale.schedule if hours.min is not None)])


def _kept(decision: Decision, least: int, but: str) -> Decision:
    """Not fewer than these."""
    if decision.wanted >= least:
        return decision
    why = f"{decision.why}; {decision.wanted} would do, but {but}"
    return replace(decision, wanted=least, reason=Reason.WAIT, why=why)


def _check(model: PlannedModel, setting: Setting) -> None:
    """Raises `ScaleRefused` for what may not be."""
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
        text = f"{setting.replicas} replicas are outside of {low} to {high}; `--min` and `--max` set other bounds"
        raise ScaleRefused(text if rules is not None else f"at least {low}, at most {high} replicas", "replicas")


def _in_words(setting: Setting) -> str:
    """What people have set, and who."""
    named = (("replicas", setting.replicas), ("min", setting.min), ("max", setting.max))
    told = ", ".join(f"{name} {value}" for name, value in named if value is not None)
    return f"{told} set by {setting.by}{f': {setting.why}' if setting.why else ''}" if told else ""
