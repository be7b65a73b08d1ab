"""The child processes of one model version, on the server's side.

process = ModelProcess(spec, hang_s=60, load_timeout_s=600, log=log, on_call=..., on_change=...)
tasks.create_task(process.run())          # supervises the children until stop(); may raise GaveUp
loaded = await process.wait_ready()       # Loaded (of the backend protocol) or GaveUp
batch = process.execute(0, works, listener)
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from forebay.core.serving.errors import Kind, Refused
from forebay.engines.tensor.measures import Ledger
from forebay.engines.tensor.protocol import Loaded
from forebay.modelserver.process.lane import BATCHES_MAX
from forebay.modelserver.process.placement import ChildSpec, Placement
from forebay.modelserver.process.supervisor import Supervisor
from forebay.modelserver.process.values import Execute, GaveUp, Listener, OnCall, WarmUp, Work
from forebay.modelserver.waiting import in_group

STOPPED = "it has been stopped"
GIVEN_UP = "the change of its instances has been given up"


class ModelProcess:
    """The child processes of a model version. All methods are called on the server's loop."""

    def __init__(
        self,
        spec: ChildSpec,
        *,
        hang_s: float,
        load_timeout_s: float,
        log: structlog.stdlib.BoundLogger,
        on_call: OnCall | None = None,
        on_change: Callable[[], None] = lambda: None,
        stop_grace_s: float = 5.0,
        ledger: Ledger | None = None,
    ) -> None:
        """`on_change` is called when `usable` changes for any instance, and at the end.

        The model's custom metrics go into `ledger`.
        """
        self._spec = spec
        self._hang_s = hang_s
        self._load_timeout_s = load_timeout_s
        self._stop_grace_s = stop_grace_s
        self._log = log
        self._on_call = on_call
        self._on_change = on_change
        self._ledger = ledger or Ledger()
        self._tasks: asyncio.TaskGroup | None = None
        self._supervisors: list[Supervisor] = []
        self._by_instance: list[Supervisor] = []
        """The supervisor that serves each instance."""
        self._resizing = asyncio.Lock()
        self._batches = itertools.count(1)
        self._loaded: Loaded | None = None
        self._ready_once = False
        self._failures: dict[Supervisor, str] = {}
        self._failed = ""
        self._replaced = 0
        """Restarts counted by supervisors that have ended."""
        self._over = False
        """No child is to run any more."""
        self._given_up = False
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Start the children and keep them running until `stop`, then stop them all. Raises `GaveUp`.

        A child that crashes, hangs, or outgrows `rss_bytes_max` is restarted, with backoff after quick failures. When
        this raises, every batch has been answered and every process has exited.
        """
        try:
            await in_group(self._run)
        finally:
            self._tasks = None
            self.stop()
        if self._failed:
            raise GaveUp(self._failed)

    async def _run(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        if await self._start():
            self._ready_once = True
            self._tell()
            await self._until(lambda: False)
        self.stop()

    async def wait_ready(self) -> Loaded:
        """Wait until all instances are loaded; returns the model's description. Raises `GaveUp` as `run` does."""
        await self._until(lambda: self._ready_once)
        if self._over or self._loaded is None:
            raise GaveUp(self._failed or STOPPED)
        return self._loaded

    def stop(self) -> None:
        """Make `run` stop the children and return. Batches in flight fail (UNAVAILABLE): drain first."""
        self._over = True
        for supervisor in self._supervisors:
            supervisor.stop()
        self._tell()

    def give_up(self) -> None:
        """Abort a change of the instances that waits for new ones."""
        self._given_up = True
        self._tell()

    @property
    def loaded(self) -> Loaded | None:
        """The model's description as loaded; kept while a dead child is replaced."""
        return self._loaded

    @property
    def instances(self) -> int:
        """Number of instances, usable or not."""
        return len(self._by_instance)

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of the running children."""
        return [supervisor.pid for supervisor in self._supervisors if supervisor.pid]

    @property
    def replaced(self) -> int:
        """How many times a child has been replaced."""
        return self._replaced + sum(supervisor.replaced for supervisor in self._supervisors)

    def stalled_s(self, now: float) -> float:
        """How long, by the loop's clock, every child has left a ping unanswered."""
        return min((supervisor.stalled_s(now) for supervisor in self._supervisors), default=0.0)

    @property
    def reason(self) -> str:
        """Why the model is not ready; empty if every instance is usable."""
        if self._failed or self._over:
            return self._failed or STOPPED
        return next((supervisor.reason for supervisor in self._supervisors if supervisor.reason), "")

    def usable(self, instance: int) -> bool:
        """Whether `execute` may be called: loaded, not being replaced, and fewer than 2 batches in flight."""
        lane = self._by_instance[instance].lanes.get(instance)
        return lane is not None and not lane.closing and lane.outstanding < BATCHES_MAX

    def alive(self, instance: int) -> bool:
        """Whether it is loaded and not being replaced, busy or not."""
        lane = self._by_instance[instance].lanes.get(instance)
        return lane is not None and not lane.closing

    def outstanding(self, instance: int) -> int:
        """Batches in flight: 0, 1, or 2 (the second waits in the child and starts without a round trip)."""
        lane = self._by_instance[instance].lanes.get(instance)
        return 0 if lane is None else lane.outstanding

    def execute(self, instance: int, works: Sequence[Work], listener: Listener) -> int:
        """Send a batch to an instance; returns its number, for `cancel`. Raises `Refused` if it is not usable."""
        return self._send(self._by_instance[instance], instance, works, listener)

    @property
    def senders(self) -> list[Execute]:
        """For each instance a function that sends a batch to it."""
        return [partial(self._send, supervisor, index) for index, supervisor in enumerate(self._by_instance)]

    def measure(self) -> "list[asyncio.Future[None]]":
        """Request custom metrics from all children; await the futures until the ledger has them."""
        return [asked for supervisor in self._supervisors if (asked := supervisor.measure()) is not None]

    def cancel(self, batch: int, index: int) -> None:
        """Signal cancellation of a request to the model; the request still ends in the usual way."""
        any(lane.cancel(batch, index) for supervisor in self._supervisors for lane in supervisor.lanes.values())

    async def set_instances(self, placements: Sequence[Placement], warm_up: WarmUp | None = None) -> None:
        """Change the instances in place; those with an unchanged placement keep running.

        Returns when the new ones are usable and removed ones have finished their batches. Raises `GaveUp`, with the
        instances as before, if a new child cannot be loaded, or `warm_up` fails, which is run on the new ones first.
        """
        async with self._resizing:
            loaded = self._loaded
            if loaded is None:
                raise GaveUp(self._failed or STOPPED)
            self._given_up = False
            planned: list[Supervisor] = []
            failed = ""
            try:
                for index, placement in enumerate(placements):
                    planned.append(self._supervisor_for(index, placement, loaded))
            except OSError as error:
                failed = f"no channel for an instance: {error}"
            await self._until(
                lambda: (
                    bool(failed or self._given_up)
                    or all(self._settled(supervisor, index) for index, supervisor in enumerate(planned))
                )
            )
            failed = failed or (GIVEN_UP if self._given_up else "")
            failed = failed or next((self._failures[each] for each in planned if each in self._failures), "")
            if warm_up is not None and not failed and not self._over:
                failed = await self._warmed(planned, warm_up)
            before, after = (planned, self._by_instance) if failed or self._over else (self._by_instance, planned)
            self._by_instance = after
            for index, supervisor in enumerate(before):
                if index >= len(after) or after[index] is not supervisor:
                    await self._leave(supervisor, index)
            if failed or self._over:
                raise GaveUp(failed or self._failed or STOPPED)

    async def resized(self) -> None:
        """Wait for the change of instances that is under way, if there is one."""
        async with self._resizing:
            pass

    async def _start(self) -> bool:
        """Load the first child to learn what the model is, then the others. False: it failed, or was stopped."""
        if self._over:
            return False
        first = self._spawn(self._spec.instances[0], 0)
        self._by_instance = [first]
        await self._until(lambda: first.loaded is not None)
        self._loaded = first.loaded
        try:
            await self.set_instances(self._spec.instances)
        except GaveUp as gave_up:
            self._failed = self._failed or ("" if self._over else str(gave_up))
            return False
        return True

    def _supervisor_for(self, index: int, placement: Placement, loaded: Loaded) -> Supervisor:
        """The child for an instance: its present one, one that it may share, or a new one."""
        if index < len(self._by_instance) and self._by_instance[index].placement == placement:
            return self._by_instance[index]
        if loaded.threads:
            for supervisor in self._supervisors:
                if supervisor.placement == placement and not supervisor.stopping:
                    supervisor.open(index)
                    return supervisor
        return self._spawn(placement, index)

    def _spawn(self, placement: Placement, index: int) -> Supervisor:
        supervisor = Supervisor(
            self._spec,
            placement,
            [index],
            hang_s=self._hang_s,
            load_timeout_s=self._load_timeout_s,
            stop_grace_s=self._stop_grace_s,
            on_call=self._on_call,
            on_change=self._tell,
            log=self._log,
            ledger=self._ledger,
        )
        assert self._tasks is not None
        self._supervisors.append(supervisor)
        self._tasks.create_task(self._mind(supervisor))
        return supervisor

    async def _mind(self, supervisor: Supervisor) -> None:
        """Run one supervisor. If one that serves instances fails for good, the model fails."""
        text = await supervisor.run()
        self._supervisors.remove(supervisor)
        self._replaced += supervisor.replaced
        if text:
            self._failures[supervisor] = text
            if supervisor in self._by_instance:
                self._failed = self._failed or text
                self.stop()
        self._tell()

    async def _warmed(self, planned: Sequence[Supervisor], warm_up: WarmUp) -> str:
        """Warm up the instances that are new. Returns why that failed; empty: it has not."""
        kept = self._by_instance
        fresh: list[Execute] = [
            partial(self._send, supervisor, index)
            for index, supervisor in enumerate(planned)
            if index >= len(kept) or kept[index] is not supervisor
        ]
        try:
            await warm_up(fresh)
        except Refused as refused:
            return refused.text
        return ""

    def _send(self, supervisor: Supervisor, index: int, works: Sequence[Work], listener: Listener) -> int:
        lane = supervisor.lanes.get(index)
        if lane is None or lane.closing or lane.outstanding >= BATCHES_MAX:
            raise Refused(Kind.UNAVAILABLE, f"model '{self._spec.config.name}' has no free instance {index}")
        number = next(self._batches)
        lane.execute(number, works, listener)
        supervisor.watch()
        return number

    async def _leave(self, supervisor: Supervisor, index: int) -> None:
        await supervisor.drop(index)
        if not supervisor.instances:
            supervisor.stop()

    def _settled(self, supervisor: Supervisor, index: int) -> bool:
        return index in supervisor.lanes or supervisor in self._failures

    def _tell(self) -> None:
        self._changed.set()
        self._on_change()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, or for `stop`."""
        while not condition() and not self._over:
            self._changed.clear()
            await self._changed.wait()
