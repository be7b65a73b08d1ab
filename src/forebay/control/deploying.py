"""Deployments: the desired state is written to the store, and only then acted on.

Each round of the reconcile loop asks for the slots that follow from the stored state (`shaped`), and reports what
became of them (`look`); changes are stored by separate tasks, so that a slow store never delays a round. Two things
do not wait for the store, as neither can do harm: a share falls with the replicas that carry it, and a harmful canary
gets no traffic at once. While the store is down everything else stays as it is.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from forebay.control.plan import Plan, PlannedModel
from forebay.control.probe import Prober
from forebay.control.quality.quality import Quality
from forebay.control.rolling.events import (
    DONE,
    FILE,
    UNKNOWN_PACE,
    command_events,
    control_events,
    start_event,
    target_after,
)
from forebay.control.rolling.judged import aims
from forebay.control.rolling.ledger import Ledger
from forebay.control.rolling.pace import Pace
from forebay.control.rolling.preparing import Preparer
from forebay.control.rolling.recalling import Recall
from forebay.control.rolling.shaping import Shaper, base_held, deployed, ready_of
from forebay.control.rolling.validating import check_plan, new_rollout
from forebay.control.rolling.values import DeployRefused, RevisionSource, RolloutRequest, RolloutStanding
from forebay.control.rolling.watching import Looked, Watch
from forebay.core.deploy.counting import Counted, Cursor, advanced
from forebay.core.deploy.evidence import observations
from forebay.core.deploy.rollout import (
    ENDED,
    Command,
    ModelObservation,
    Phase,
    Rollout,
    Wanted,
    decide,
    roll_back,
    wanted,
)
from forebay.core.deploy.samples import Observed
from forebay.core.deploy.slots import Held, with_canary, with_stable
from forebay.core.deploy.splitting import split_of
from forebay.core.model import ModelRoutes
from forebay.core.reconcile import ObservedUnit
from forebay.core.rollout import State as Evidence
from forebay.core.rollout import Verdict, effects, judge, observe
from forebay.obs.clock import wall_s
from forebay.store.access import RunBlocking
from forebay.store.database import StoreError
from forebay.store.rollouts import RolloutEvent, Rollouts, Row, Target

__all__ = ["DeployRefused", "Deployments", "RevisionSource", "RolloutRequest", "RolloutStanding", "RunBlocking"]

EVIDENCE_EVERY_S: Final = 5.0
"""How often evidence is stored while nothing else changes."""
PAGES_MAX: Final = 16
"""How often gateways are polled in one round, as long as one has more samples than fit in a response."""
PAGE_SAMPLES: Final = 1000
"""A response with so many samples may be incomplete."""


class Deployments:
    """The rollouts and targets of every model.

    `quality` judges responses; None: they are not judged. `recall` allows a start while the store is down; None: that
    fails.
    """

    def __init__(
        self,
        records: Rollouts,
        source: RevisionSource,
        run: RunBlocking,
        *,
        note: Callable[[str, str], None],
        quality: Quality | None = None,
        recall: Recall | None = None,
    ) -> None:
        self._ledger = Ledger(records, run, note, recall)
        self._source = source
        self._run_blocking = run
        self._note = note
        self._quality = quality
        self._preparer = Preparer(source, note)
        self._shaper = Shaper()
        self._pace = Pace()
        self._watches: dict[str, Watch] = {}
        """By rollout id; active rollouts only."""
        self._models: dict[str, PlannedModel] = {}
        """As declared in the cluster file."""
        self._tasks: asyncio.TaskGroup | None = None
        self._wake: Callable[[], None] = lambda: None

    @property
    def trouble(self) -> str:
        """Why the store is unavailable; empty: it is available."""
        return self._ledger.trouble

    def close(self) -> None:
        """Close the store."""
        self._ledger.close()

    def hindrance(self, model: str, revision: str) -> str:
        """Why a revision cannot be brought to this machine; empty: it is here, being fetched, or not wanted."""
        return self._preparer.refused.get((model, revision), "")

    async def begin(self, plan: Plan) -> None:
        """Load the stored state, before the first round; while the store is down, the recalled state.

        Raises `StoreError` if there is none, or if the cluster file has changed since.
        """
        await self._ledger.open()
        self._set_models(plan)
        await self._follow_the_file(self._models)

    async def run(self, wake: Callable[[], None]) -> None:
        """Work in the background until cancelled; `wake` requests a round."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks, self._wake = tasks, wake
            if self._quality is not None:
                tasks.create_task(self._quality.run())
            try:
                await asyncio.Event().wait()
            finally:
                self._tasks = None

    async def deploy(self, request: RolloutRequest, actor: str) -> RolloutStanding:
        """Start a rollout. Raises `DeployRefused`, `StoreError`."""
        ledger = self._ledger
        async with ledger.turn:
            await self._make_sure()
            model = self._models.get(request.model)
            if model is None:
                there = ", ".join(sorted(self._models))
                raise DeployRefused(f"there is no model {request.model}; there is: {there}", "model")
            last, pace, why = ledger.rows.get(request.model), self._pace.per_s(request.model), request.why
            row = await new_rollout(
                request, model, ledger.targets.get(request.model), last, source=self._source, run=self._run_blocking
            )
            if pace is not None and not request.unchecked:
                await check_plan(row, model, pace, last, self._run_blocking)
            elif pace is None and not request.unchecked:
                why = f"{why} ({UNKNOWN_PACE})" if why else UNKNOWN_PACE
            now = wall_s()
            row = replace(row, rollout=replace(row.rollout, since=now), created_at=now, created_by=actor)
            self._preparer.forget(request.model, row.rollout.canary)
            kept = await ledger.begin(row, start_event(row, why))
            self._wake()
            return self._standing(kept)

    async def command(self, id: str, command: Command, actor: str, why: str) -> RolloutStanding:
        """Apply an operator's command to an active rollout. Raises `DeployRefused`, `StoreError`."""
        ledger = self._ledger
        async with ledger.turn:
            await self._make_sure()
            row = next((each for each in ledger.rows.values() if each.rollout.id == id), None)
            if row is None:
                raise DeployRefused(f"there is no rollout {id} in progress", "id")
            if row.ended or row.rollout.model not in self._models:
                raise DeployRefused(f"rollout {id} has ended: {row.rollout.phase}")
            wall, model = wall_s(), self._models[row.rollout.model]
            seen = self._watch(row).seen or ModelObservation(len(model.slots), None, None)
            rollout, asks = decide(row.rollout, seen, command, wall)
            if command in (Command.ABORT, Command.PAUSE):
                rollout = replace(rollout, why=f"{DONE[command]} by {actor}{f': {why}' if why else ''}")
            following = replace(row, rollout=rollout, held=_held(row.held, seen.wanted, asks, rollout))
            return self._standing(await self._change(row, following, command_events(command, actor, why, wall)))

    def under_way(self, model: str) -> Rollout | None:
        """The active rollout of a model."""
        row = self._row(model)
        return None if row is None else row.rollout

    def standing(self, model: str | None = None) -> tuple[RolloutStanding, ...]:
        """Active rollouts, and the last one of each model without one."""
        rows = [row for name, row in sorted(self._ledger.rows.items()) if model in (None, name)]
        return tuple(self._standing(row) for row in rows)

    async def past(self, model: str | None, last: int) -> tuple[RolloutStanding, ...]:
        """The last rollouts, of a model or of all: active ones, then ended ones, newest first."""
        return tuple(self._standing(row) for row in await self._ledger.past(model, last))

    def _standing(self, row: Row) -> RolloutStanding:
        model = self._models.get(row.rollout.model)
        watch = None if row.ended else self._watches.get(row.rollout.id)
        seen = (watch.seen if watch else None) or ModelObservation(len(model.slots) if model else 0, None, None)
        return RolloutStanding(
            rollout=row.rollout,
            created_at=row.created_at,
            created_by=row.created_by,
            verdict=_judged(row, row.counted.state),
            effects=effects(row.rules, row.counted.state),
            stable_ready=seen.stable_ready,
            canary_ready=seen.canary_ready,
            wanted=wanted(row.rollout, seen),
            seen=row.counted.seen,
        )

    def problems(self, plan: Plan) -> tuple[str, ...]:
        """Why another plan may not be applied now."""
        declared = {model.routes.name: model.routes.revision for model in plan.models}
        return tuple(
            f"models.{name}: declares another revision while rollout {row.rollout.id} is under way; end that first: "
            f"forebay rollout abort {name}"
            for row in self._ledger.under_way
            if (name := row.rollout.model) in self._models
            and declared.get(name, "") not in ("", self._models[name].routes.revision)
        )

    async def take_over(self, plan: Plan) -> None:
        """Prepare for another plan: what it newly declares takes effect. Raises `StoreError`."""
        async with self._ledger.turn:
            await self._follow_the_file({model.routes.name: model for model in plan.models})
            self._set_models(plan)

    async def _read_again(self) -> None:
        async with self._ledger.turn:
            with suppress(StoreError):
                await self._make_sure()

    async def _make_sure(self) -> None:
        """Make sure that the stored state is known; the cluster file is the one already loaded. Raises
        `StoreError`."""
        if self._ledger.doubtful:
            await self._ledger.read()
            await self._follow_the_file(self._models)

    async def _follow_the_file(self, models: Mapping[str, PlannedModel]) -> None:
        """Where the cluster file declares another revision than when a target was written, the file wins."""
        now, ledger = wall_s(), self._ledger
        for lost in ledger.under_way:
            if lost.rollout.model not in models:
                await self._end(lost, "the model is no longer in the cluster file", now)
        for name, model in sorted(models.items()):
            target, row, declared = ledger.targets.get(name), self._row(name), model.routes.revision
            meant = target.declared if target else row.rollout.stable if row else declared
            if meant == declared:
                continue
            held = row.held.stable if row else base_held(model, target)
            new = Target(name, declared, declared, held, now, FILE, "the cluster file declares another revision")
            if row is not None:
                await self._end(row, new.why, now, new)
            else:
                await ledger.point(new, RolloutEvent("target.set", now, FILE, new.why))

    async def _end(self, row: Row, why: str, now: float, target: Target | None = None) -> None:
        """End a rollout because of the cluster file."""
        ended = replace(row, rollout=roll_back(row.rollout, why, now))
        await self._change(row, ended, (RolloutEvent("rollout.rolled_back", now, FILE, why),), target)

    def shaped(self, plan: Plan, units: Iterable[ObservedUnit]) -> Plan:
        """The plan with the stored revisions, and a slot for each of their replicas."""
        self._set_models(plan)
        if not self._ledger.targets and not self._ledger.under_way:
            return plan
        seen, models = tuple(units), []
        for model in plan.models:
            name = model.routes.name
            target, row = self._ledger.targets.get(name), self._ledger.rows.get(name)
            if target is None and (row is None or row.ended):
                models.append(model)
                continue
            what = deployed(model, target, row)
            for revision in (what.stable, what.canary):
                self._prepare(model, revision)
            models.append(self._shaper.shaped(model, what, self._preparer.of(name), plan, seen))
        return replace(plan, models=tuple(models))

    def _prepare(self, model: PlannedModel, revision: str) -> None:
        """Fetch a revision in the background, unless it is there."""
        name = model.routes.name
        if self._tasks is None or revision in ("", model.routes.revision):
            return
        if self._preparer.may_begin(name, revision):
            self._in_background(partial(self._preparer.prepare, name, revision))

    async def collect(self, prober: Prober, units: Iterable[ObservedUnit]) -> None:
        """Poll the gateways for samples; rollouts at the same cursors share a poll."""
        groups: dict[tuple[tuple[str, Cursor], ...], list[Row]] = {}
        for row in self._ledger.under_way:
            groups.setdefault(tuple(sorted(row.counted.cursors.items())), []).append(row)
        seen, now = tuple(units), asyncio.get_running_loop().time()
        if self._pace.is_due(now):
            self._pace.take(await prober.pages(seen), now)
        for cursors, rows in groups.items():
            after = dict(cursors)
            for _ in range(PAGES_MAX):
                observed = await prober.observations(seen, after)
                for row in rows:
                    self._count(row, after, observed)
                after = advanced(after, observed)
                if not any(len(each.samples) >= PAGE_SAMPLES for each in observed.values()):
                    break

    def _count(self, of: Row, asked: Mapping[str, Cursor], observed: Mapping[str, Observed]) -> None:
        """Count what followed `asked`, unless the rollout has moved on meanwhile."""
        row = self._row(of.rollout.model)
        if row is None or row.rollout.id != of.rollout.id or row.counted.cursors != asked:
            return
        id, watch, state = row.rollout.id, self._watch(row), row.counted.state
        samples = [each for slot in sorted(observed) for each in observed[slot].samples if each.rollout == id]
        watch.hear(samples)
        # While all traffic goes to the canary, only its responses can be compared.
        found = observations(samples, row.rules) if row.rollout.phase is Phase.COMPARING else []
        if self._quality is not None:
            pairs = (pair for slot in sorted(observed) for pair in observed[slot].pairs)
            self._quality.take(pair for pair in pairs if pair.rollout == id)
            found += self._quality.drain(id)
        if found:
            state = observe(row.rules, state, found)
            watch.verdict = _judged(row, state)
        if observed or state is not row.counted.state:
            counted = Counted(state, advanced(row.counted.cursors, observed), row.counted.seen + len(samples))
            self._ledger.rows[row.rollout.model] = replace(row, counted=counted)

    def look(self, models: tuple[ModelRoutes, ...], looked: Looked) -> None:
        """Observe the replicas, and advance each rollout as far as they allow."""
        wall, ledger = wall_s(), self._ledger
        under_way = {row.rollout.id for row in ledger.under_way}
        self._watches = {id: watch for id, watch in self._watches.items() if id in under_way}
        if ledger.doubtful and ledger.free():
            self._in_background(self._read_again)
        for routes in models:
            row = self._row(routes.name)
            if row is None or routes.name not in self._models:
                continue
            watch = self._watch(row)
            slots = [f"{routes.name}-{index}" for index in row.held.canary]
            watch.look(slots, looked, wall)
            watch.listen(slots, looked.reports, wall)
            watch.seen = seen = replace(self._seen(row, routes), tripped=watch.tripped(wall))
            self._advance(row, seen, wall)
        if self._quality is not None:
            self._quality.aim(aims(ledger.under_way, self._models, models))

    def divided(self, models: tuple[ModelRoutes, ...]) -> tuple[ModelRoutes, ...]:
        """The routes, with the traffic split where a rollout is active."""
        told = []
        for routes in models:
            row = self._row(routes.name)
            if row is None or routes.name not in self._models:
                told.append(routes)
                continue
            watch = self._watch(row)
            split = split_of(row.rollout, self._seen(row, routes), bool(watch.withdrawn))
            if split.share < row.rollout.share:
                watch.short_at = asyncio.get_running_loop().time()
            told.append(replace(routes, split=split))
        return tuple(told)

    def _seen(self, row: Row, routes: ModelRoutes) -> ModelObservation:
        """The replica counts as gateways see them, and the verdict of the evidence."""
        stable, canary = (ready_of(routes, each) for each in (row.rollout.stable, row.rollout.canary))
        watch, several = self._watch(row), len(self._models[routes.name].slots)
        whole_s = asyncio.get_running_loop().time() - watch.short_at
        return ModelObservation(several, stable, canary, watch.verdict, whole_s=whole_s)

    def _advance(self, row: Row, seen: ModelObservation, wall: float) -> None:
        """Decide, and have the result stored; a changed reason alone is not stored."""
        watch, ledger = self._watch(row), self._ledger
        if row.rollout.phase is Phase.STARTING and not seen.canary_ready and not self._prepared(row):
            # The start timeout of replicas begins once their revision has been fetched.
            ledger.rows[row.rollout.model] = row = replace(row, rollout=replace(row.rollout, since=wall))
        following = self._following(row, seen, wall)
        if following.rollout.phase is Phase.ROLLED_BACK:
            watch.withdrawn = following.rollout.why
        told = replace(row, rollout=replace(row.rollout, why=following.rollout.why))
        if following == told:
            ledger.rows[row.rollout.model] = told
            if not watch.is_due(row.counted, asyncio.get_running_loop().time(), EVIDENCE_EVERY_S):
                return
        if not ledger.doubtful and ledger.free():
            self._in_background(partial(self._keep, row, following))

    def _following(self, row: Row, seen: ModelObservation, wall: float) -> Row:
        rollout, name = row.rollout, row.rollout.model
        harm = self._watch(row).withdrawn or self._preparer.refused.get((name, rollout.canary))
        if harm:
            return replace(row, rollout=roll_back(rollout, harm, wall))
        if seen.tripped is None and not self._prepared(row):
            return replace(row, rollout=replace(rollout, why=f"{rollout.canary} is being prepared"))
        rollout, asks = decide(rollout, seen, None, wall)
        return replace(row, rollout=rollout, held=_held(row.held, seen.wanted, asks, rollout))

    def _prepared(self, row: Row) -> bool:
        name, canary = row.rollout.model, row.rollout.canary
        return canary == self._models[name].routes.revision or canary in self._preparer.of(name)

    async def _keep(self, row: Row, following: Row) -> None:
        """Store the successor of a row, unless the rollout has changed in the meantime."""
        async with self._ledger.turn:
            current = self._row(row.rollout.model)
            if current is None or (current.rollout.id, current.version) != (row.rollout.id, row.version):
                return
            with suppress(StoreError):
                await self._change(row, replace(following, counted=current.counted))

    async def _change(
        self, row: Row, following: Row, events: tuple[RolloutEvent, ...] = (), target: Target | None = None
    ) -> Row:
        """Store a change, with control's own events if no operator requested it. Raises `StoreError`."""
        now, name = wall_s(), row.rollout.model
        events = events or control_events(row, following, now)
        model = self._models.get(name)
        if target is None and model is not None:
            target = target_after(following, model, self._ledger.targets.get(name), now)
        kept = await self._ledger.change(row, following, events, target)
        self._watch(row).store(following.counted, asyncio.get_running_loop().time())
        if events:
            self._wake()
        return kept

    def _set_models(self, plan: Plan) -> None:
        self._models = {model.routes.name: model for model in plan.models}

    def _row(self, model: str) -> Row | None:
        """The active rollout of a model."""
        row = self._ledger.rows.get(model)
        return None if row is None or row.ended else row

    def _watch(self, row: Row) -> Watch:
        watch = self._watches.get(row.rollout.id)
        if watch is None:
            now = asyncio.get_running_loop().time()
            watch = self._watches[row.rollout.id] = Watch(row.counted, _judged(row, row.counted.state), now)
        return watch

    def _in_background(self, work: Callable[[], Awaitable[None]]) -> None:
        if self._tasks is not None:
            self._tasks.create_task(self._supervised(work))

    async def _supervised(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
            self._wake()
        except Exception as mistake:  # supervisor: the stored state is read again, and control goes on
            self._ledger.doubtful = True
            self._note("trouble", f"rollouts: {type(mistake).__name__}: {mistake}")


def _judged(row: Row, state: Evidence) -> Verdict:
    """The verdict of the evidence, at the canary's request rate so far."""
    requests = max((each.total.canary for each in state.rates.values()), default=0)
    return judge(row.rules, state, requests / max(1.0, wall_s() - row.created_at))


def _held(held: Held, several: int, asks: Wanted, rollout: Rollout) -> Held:
    """The slots of both revisions, as many as are wanted; those of an ended rollout are reported unchanged."""
    if rollout.phase in ENDED:
        return held
    return with_canary(with_stable(held, several), asks.canary)
