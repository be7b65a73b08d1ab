"""The reconcile loop: observe, decide, publish, act, then wait until something can have changed."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from enum import Enum, auto

from forebay.control.deploying import Deployments
from forebay.control.health.health import Health
from forebay.control.journal import Journal
from forebay.control.leading.term import Leading
from forebay.control.leasing import Leases
from forebay.control.placing.measuring import MEASURE_EVERY_S
from forebay.control.placing.placer import Placer
from forebay.control.plan import Plan
from forebay.control.probe import Prober
from forebay.control.rolling.watching import Looked
from forebay.control.scaling.reading import Look
from forebay.control.scaling.scaler import Scaler
from forebay.control.snapshot import SnapshotFile, make_routes
from forebay.control.standby.standby import Standby
from forebay.core.model import LoadReport, ModelRoutes, ReplicaState
from forebay.core.reconcile import (
    Action,
    Answered,
    ClusterObservation,
    Kind,
    ObservedUnit,
    Place,
    Remove,
    Rules,
    Slot,
    State,
    UnitKey,
    Verdict,
    decide,
)
from forebay.obs.clock import wall_s
from forebay.obs.metrics import Metrics
from forebay.providers.protocol import Provider, ProviderError

OBSERVE_TIMEOUT_S = 10.0
PAUSE_S_MIN = 0.02
PAUSE_AFTER_MISTAKE_S = 1.0
LOOK_TIMEOUT_S = 2.0


class Phase(Enum):
    """The goal of control. Gateways stop first, so that no requests are sent to a stopping worker."""

    RUN = auto()
    STOP_GATEWAYS = auto()
    STOP_ALL = auto()
    STOPPED = auto()


class Controller:
    """Reconciles what runs with the plan. Its public fields are for others to read and change once per round."""

    def __init__(
        self,
        plan: Plan,
        provider: Provider,
        prober: Prober,
        *,
        snapshot: SnapshotFile,
        journal: Journal,
        metrics: Metrics,
        rules: Rules,
        leases: Leases | None = None,
        deployments: Deployments | None = None,
        scaler: Scaler | None = None,
        leading: Leading | None = None,
        standby: Standby | None = None,
        health: Health | None = None,
        placer: Placer | None = None,
    ) -> None:
        self.plan = plan
        """The desired state, including spares while replicas are being replaced."""
        self.state = State()
        self.units: dict[UnitKey, ObservedUnit] = {}
        self.reports: dict[UnitKey, LoadReport] = {}
        self.trouble = ""
        """Why control cannot do its work at the moment; empty: it can."""
        self.phase = Phase.RUN
        self._asked = plan
        self._shaped: Plan | None = None
        """The plan including deployments, as of the last round."""
        self._settled: Plan | None = None
        """The same plan with its slots placed."""
        self._provider = provider
        self._prober = prober
        self._snapshot = snapshot
        self._journal = journal
        self._metrics = metrics
        self._rules = rules
        self._leases = leases
        self.leading = leading
        """The leadership among several controllers; None: this is the only one."""
        self.deployments = deployments
        """The deployments; None: only what the cluster file declares is deployed."""
        self.scaler = scaler
        """The scaler; None: replica counts are those of the plan."""
        self.standby = standby
        """The standby pools; None: no replica is on standby."""
        self.health = health
        """The health of nodes and devices; None: all count as healthy."""
        self.placer = placer
        """The placement of replicas; None: left to the provider."""
        self._refused: dict[str, str] = {}
        self._failures = 0
        self._wake = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []
        self._runs = False

    async def run(self) -> None:
        """Work until stopped and drained. If cancelled, the units keep running."""
        self._runs = True
        self._snapshot.read()
        if self._leases is not None:
            self._leases.read()
        if self.scaler is not None:
            await self.scaler.begin()
        if self.health is not None:
            await self.health.begin()
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch())
            deploying = tasks.create_task(self.deployments.run(self._wake.set)) if self.deployments else None
            scaling = tasks.create_task(self.scaler.run(self._wake.set)) if self.scaler else None
            nursing = tasks.create_task(self.health.run(self._wake.set)) if self.health else None
            weighing = tasks.create_task(self._weigh(self.placer)) if self.placer else None
            keeping = tasks.create_task(self.standby.run(lambda: self.plan)) if self.standby else None
            while not self.is_over:
                self._wake.clear()
                waiters, self._waiters = self._waiters, []
                try:
                    again_s = await self._round()
                except Exception as mistake:  # supervisor: the units need supervision whatever happens
                    self._fail("round", f"{type(mistake).__name__}: {mistake}")
                    again_s = PAUSE_AFTER_MISTAKE_S
                for waiter in waiters:
                    if not waiter.done():
                        waiter.set_result(None)
                if not self.is_over:
                    await self._pause(again_s)
            watching.cancel()
            for task in (deploying, scaling, nursing, weighing, keeping):
                if task is not None:
                    task.cancel()

    @property
    def stopping(self) -> bool:
        """Whether control was asked to stop everything."""
        return self.phase is not Phase.RUN

    @property
    def is_over(self) -> bool:
        """Whether everything has been stopped."""
        return self.phase is Phase.STOPPED

    def take_over(self, plan: Plan, leases: Leases | None) -> None:
        """Reconcile towards another plan from the next round on: gateways get it first, units follow one by one."""
        kept = {model.routes.name for model in plan.models}
        for name in sorted({model.routes.name for model in self._asked.models} - kept):
            self._metrics.forget("rollout_share", name)
            self._metrics.forget("standby_replicas", name)
            for state in ReplicaState:
                self._metrics.forget("replicas", name, state.value)
        if leases is not None:
            leases.read()
        self._asked, self._leases = plan, leases
        self._wake.set()

    def stop(self) -> None:
        """Drain: gateways first, then replicas; then `run` returns."""
        if self.phase is Phase.RUN:
            self.phase = Phase.STOP_GATEWAYS
            self._rules = replace(self._rules, starting_max=0, unwanted_why="the cluster stops")
            self._journal.note("stopping", "asked to stop: gateways drain first, then replicas")
            self._wake.set()

    def kill(self) -> None:
        """Stop without waiting for anything to drain."""
        self.stop()
        self._rules = replace(self._rules, grace_s_max=0.0)
        self._wake.set()

    async def look(self) -> None:
        """Return when a round that began after this call has ended, or after `LOOK_TIMEOUT_S`; at once if not
        running."""
        if not self._runs:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._wake.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                await waiter

    async def _watch(self) -> None:
        while True:
            await self._provider.changed()
            self._wake.set()

    async def _pause(self, longest_s: float) -> None:
        await asyncio.sleep(PAUSE_S_MIN)  # whatever wakes us, do not spin
        with suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await self._wake.wait()

    async def _round(self) -> float:
        """Run one round; returns when the next one is due."""
        loop = asyncio.get_running_loop()
        began, failures = loop.time(), self._failures
        seen = await self._observe()
        why_not = self._why_not()
        if why_not:  # do not advance the state by actions that cannot be taken
            self._fail("lead", why_not)
            return self._rules.look_again_s
        before = self.state
        if seen.units is not None:
            # Nothing else is awaited from here to the snapshot, so the deployments stay the same.
            wanted = self._placed(await self._deployed(seen.units), seen.units)
            self.plan = wanted.with_spares(before, seen.units)
        self.state, verdict = decide(self._wanted(), before, seen, loop.time(), self._rules)
        self._report(before, seen, verdict)
        if self.scaler is not None:
            self.scaler.see(verdict.moves, self.plan, loop.time())
        if seen.units is not None:
            self._publish(before, seen.units, verdict)
            self._remember(Looked(before, self.state, verdict.moves, self.reports), began)
            await self._lend(seen.units)
            await self._act(verdict.actions)
            self._advance(seen.units)
        if self._failures == failures:
            self.trouble = ""
        self._metrics.histogram("reconcile_duration_seconds").observe(loop.time() - began)
        return min(verdict.look_again_s, self.scaler.look_again_s) if self.scaler else verdict.look_again_s

    async def _deployed(self, units: Iterable[ObservedUnit]) -> Plan:
        """The requested plan, scaled by the load, with the deployed revisions.

        An error in these must not affect everything else.
        """
        deployments, scaler, seen = self.deployments, self.scaler, tuple(units)
        try:
            if scaler is not None and self.phase is Phase.RUN:
                await scaler.collect(self._prober, seen, self._asked)
            if deployments is not None:
                await deployments.collect(self._prober, seen)
            asked = self._asked if scaler is None else scaler.sized(self._asked, self._looked(seen))
            if self.standby is not None:
                asked = self.standby.pooled(asked)
            self._shaped = asked if deployments is None else deployments.shaped(asked, seen)
        except Exception as mistake:  # supervisor: units are supervised as before
            if self._shaped is None:
                raise
            self._fail("rollouts", f"{type(mistake).__name__}: {mistake}")
        return self._shaped

    def _placed(self, plan: Plan, units: tuple[ObservedUnit, ...]) -> Plan:
        """The plan with a place for each replica; without places, all replicas would look outdated."""
        if self.placer is None:
            return plan
        try:
            self._settled = self.placer.placed(plan, units, self.state)
        except Exception as mistake:  # supervisor: units are supervised as before
            if self._settled is None:
                raise
            self._fail("placement", f"{type(mistake).__name__}: {mistake}")
        return self._settled

    async def _weigh(self, placer: Placer) -> None:
        """Measure the memory of replicas periodically; nothing depends on it."""
        while True:
            try:
                await placer.footprints.run(lambda: list(self.units.values()), lambda: placer.needs)
            except Exception as mistake:  # supervisor: the last measurement stays
                self._fail("footprints", f"{type(mistake).__name__}: {mistake}")
                await asyncio.sleep(MEASURE_EVERY_S)

    def _looked(self, units: tuple[ObservedUnit, ...]) -> Look:
        names = [model.routes.name for model in self._asked.models]
        rolling = {name for name in names if self.deployments and self.deployments.under_way(name)}
        standbys = self.standby.standbys if self.standby else ()
        duty = {name: self.health.duty(name) for name in names} if self.health else {}
        pools = self.standby.pools if self.standby else {}
        return Look(self.state, units, self.reports, rolling, standbys, duty, pools)

    def _look(self, models: tuple[ModelRoutes, ...], looked: Looked) -> None:
        assert self.deployments is not None
        try:
            self.deployments.look(models, looked)
        except Exception as mistake:  # supervisor: rollouts stay as they are
            self._fail("rollouts", f"{type(mistake).__name__}: {mistake}")

    def _wanted(self) -> Iterable[Slot]:
        match self.phase:
            case Phase.RUN:
                return self.plan.slots
            case Phase.STOP_GATEWAYS:
                return [slot for slot in self.plan.slots if slot.kind is Kind.REPLICA]
            case _:
                return []

    def _advance(self, units: Iterable[ObservedUnit]) -> None:
        """Enter the next phase of stopping once the current one is done."""
        if self.phase is Phase.STOP_GATEWAYS and not any(u.alive for u in units if u.kind is Kind.GATEWAY):
            self.phase = Phase.STOP_ALL
            self._wake.set()
        elif self.phase is Phase.STOP_ALL and not units:
            self.phase = Phase.STOPPED

    async def _observe(self) -> ClusterObservation:
        try:
            async with asyncio.timeout(OBSERVE_TIMEOUT_S):
                units = await self._provider.observe()
        except (ProviderError, TimeoutError) as error:
            self._fail("observe", str(error) or f"no response within {OBSERVE_TIMEOUT_S:g} s")
            return ClusterObservation(None, trouble=self.trouble)
        answers = await self._prober.ask(units)
        if self._prober.trouble:
            self._fail("observe", self._prober.trouble)
        refused, self._refused = self._refused, {}
        self.units = {unit.key: unit for unit in units}
        self.reports = {key: report for key, report in self.reports.items() if key in self.units}
        for key, answer in answers.items():
            if isinstance(answer, Answered) and answer.report:
                self.reports[key] = answer.report
        condemned = self.health.condemned(units) if self.health is not None else {}
        return ClusterObservation(units, answers, refused, condemned=condemned)

    def _publish(self, before: State, units: Iterable[ObservedUnit], verdict: Verdict) -> None:
        """Publish before acting: gateways learn that a replica stops before it does."""
        known = {unit.key: unit for unit in units}
        try:
            models = make_routes(self.plan, self.state, known, self.reports, self._snapshot.replicas)
            if self.deployments is not None:
                if self.phase is Phase.RUN:
                    self._look(models, Looked(before, self.state, verdict.moves, self.reports))
                models = self.deployments.divided(models)
            if self.health is not None:
                models = self.health.weighed(models)
            if self.standby is not None:
                models = self.standby.routed(models, self.plan, self._snapshot.replicas)
            for model in models:
                share = model.split.share if model.split else 0.0
                self._metrics.gauge("rollout_share", model.name).set(share)
            self._snapshot.write(models, self.plan.dispatch, self.plan.tenants)
        except OSError as error:
            self._fail("publish", f"the snapshot cannot be written: {error}")
        self._metrics.gauge("snapshot_version").set(self._snapshot.current.version)

    def _remember(self, looked: Looked, began: float) -> None:
        """Record the availability of the models; nothing depends on it."""
        if self.standby is None or self.phase is not Phase.RUN:
            return
        told, now = self._snapshot.current, asyncio.get_running_loop().time()
        try:
            self.standby.remember(self.plan, looked, told, began, now)
        except Exception as mistake:  # supervisor: only the history is affected
            self._fail("availability", f"{type(mistake).__name__}: {mistake}")

    def _why_not(self) -> str:
        """Why nothing may be done now; empty: it may."""
        return self.leading.why_not() if self.leading is not None else ""

    async def _lend(self, units: Iterable[ObservedUnit]) -> None:
        """Divide the tenants' limits among the gateways. An error here leaves gateways with less, never with more."""
        leases = self._leases
        if leases is None:
            return
        demands = await self._prober.demands(units)
        if self._why_not():
            return  # another control leads meanwhile, and may have granted leases
        try:
            leases.renew(demands, asyncio.get_running_loop().time(), wall_s())
        except OSError as error:
            self._fail("lend", f"the leases cannot be written: {error}")

    async def _act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            why_not = self._why_not()
            if why_not:
                self._fail("lead", why_not)
                return
            try:
                match action:
                    case Place(slot, generation):
                        await self._provider.place(slot, generation)
                    case Remove(slot, generation, grace_s):
                        await self._provider.remove(slot, generation, grace_s)
            except ProviderError as error:
                self._fail("act", str(error))
                if isinstance(action, Place):
                    self._refused[action.slot.id] = str(error)

    def _fail(self, step: str, text: str) -> None:
        if text != self.trouble:
            self._journal.note("trouble", f"{step}: {text}")
        self.trouble = text
        self._failures += 1
        self._metrics.counter("reconcile_failures_total", step).inc()

    def _report(self, before: State, seen: ClusterObservation, verdict: Verdict) -> None:
        """Report the verdict to the journal and the metrics."""
        for move in verdict.moves:
            self._journal.note(
                move.event.value,
                move.why,
                unit=move.slot,
                generation=move.generation,
                state=move.after.value,
                last_words=move.last_words,
            )
        restarts = {s.id: s.restarts for s in before.slots}
        for s in self.state.slots:
            more = s.restarts - restarts.get(s.id, 0)
            if more > 0:
                self._metrics.counter("restarts_total", s.id).inc(more)
        states = {s.id: s.state for s in self.state.slots}
        for model in self.plan.models:
            own = [states.get(slot.id, ReplicaState.STOPPED) for slot in model.units]
            for state in ReplicaState:
                self._metrics.gauge("replicas", model.routes.name, state.value).set(own.count(state))
        looping = sum(state is ReplicaState.QUARANTINED for state in states.values())
        self._metrics.gauge("crash_loops").set(looping)
