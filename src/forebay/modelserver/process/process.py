"""The child processes of one model version, on the server's side.

process = ModelProcess(spec, hang_s=60, load_timeout_s=600, log=log, on_call=..., on_change=...)
tasks.create_task(process.run())          # supervises the children until stop(); may raise GaveUp
loaded = await process.wait_ready()       # Loaded (of the backend protocol) or GaveUp
batch = process.execute(0, works, listener)
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence

import structlog

from forebay.core.serving.errors import Kind, Refused
from forebay.engines.tensor.measures import Ledger
from forebay.engines.tensor.protocol import Loaded
from forebay.modelserver.process.keeper import Keeper
from forebay.modelserver.process.lane import BATCHES_MAX
from forebay.modelserver.process.placement import ChildSpec, Placement
from forebay.modelserver.process.values import GaveUp, Listener, OnCall, Work
from forebay.modelserver.waiting import in_group

STOPPED = "it has been stopped"


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
        self._keepers: list[Keeper] = []
        self._seats: list[Keeper] = []
        """The supervisor that serves each instance."""
        self._resizing = asyncio.Lock()
        self._batches = itertools.count(1)
        self._loaded: Loaded | None = None
        self._ready_once = False
        self._failures: dict[Keeper, str] = {}
        self._failed = ""
        self._replaced = 0
        """Restarts counted by supervisors that have ended."""
        self._over = False
        """No child is to run any more."""
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
        for keeper in self._keepers:
            keeper.stop()
        self._tell()

    @property
    def loaded(self) -> Loaded | None:
        """The model's description as loaded; kept while a dead child is replaced."""
        return self._loaded

    @property
    def instances(self) -> int:
        """Number of instances, usable or not."""
        return len(self._seats)

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of the running children."""
        return [keeper.pid for keeper in self._keepers if keeper.pid]

    @property
    def replaced(self) -> int:
        """How many times a child has been replaced."""
        return self._replaced + sum(keeper.replaced for keeper in self._keepers)

    def stalled_s(self, now: float) -> float:
        """How long, by the loop's clock, every child has left a ping unanswered."""
        return min((keeper.stalled_s(now) for keeper in self._keepers), default=0.0)

    @property
    def reason(self) -> str:
        """Why the model is not ready; empty if every instance is usable."""
        if self._failed or self._over:
            return self._failed or STOPPED
        return next((keeper.reason for keeper in self._keepers if keeper.reason), "")

    def usable(self, instance: int) -> bool:
        """Whether `execute` may be called: loaded, not being replaced, and fewer than 2 batches in flight."""
        lane = self._seats[instance].lanes.get(instance)
        return lane is not None and not lane.closing and lane.outstanding < BATCHES_MAX

    def alive(self, instance: int) -> bool:
        """Whether it is loaded and not being replaced, busy or not."""
        lane = self._seats[instance].lanes.get(instance)
        return lane is not None and not lane.closing

    def outstanding(self, instance: int) -> int:
        """Batches in flight: 0, 1, or 2 (the second waits in the child and starts without a round trip)."""
        lane = self._seats[instance].lanes.get(instance)
        return 0 if lane is None else lane.outstanding

    def execute(self, instance: int, works: Sequence[Work], listener: Listener) -> int:
        """Send a batch to an instance; returns its number, for `cancel`. Raises `Refused` if it is not usable."""
        if not self.usable(instance):
            raise Refused(Kind.UNAVAILABLE, f"model '{self._spec.config.name}' has no free instance {instance}")
        keeper = self._seats[instance]
        number = next(self._batches)
        keeper.lanes[instance].execute(number, works, listener)
        keeper.watch()
        return number

    def measure(self) -> "list[asyncio.Future[None]]":
        """Request custom metrics from all children; await the futures until the ledger has them."""
        return [asked for keeper in self._keepers if (asked := keeper.measure()) is not None]

    def cancel(self, batch: int, index: int) -> None:
        """Signal cancellation of a request to the model; the request still ends in the usual way."""
        any(lane.cancel(batch, index) for keeper in self._keepers for lane in keeper.lanes.values())

    async def set_instances(self, placements: Sequence[Placement]) -> None:
        """Change the instances in place; those with an unchanged placement keep running.

        Returns when the new ones are usable and removed ones have finished their batches. Raises `GaveUp`, with the
        instances as before, if a new child cannot be loaded.
        """
        async with self._resizing:
            loaded = self._loaded
            if loaded is None:
                raise GaveUp(self._failed or STOPPED)
            planned = [self._keeper_for(index, placement, loaded) for index, placement in enumerate(placements)]
            await self._until(lambda: all(self._settled(keeper, index) for index, keeper in enumerate(planned)))
            failed = next((self._failures[keeper] for keeper in planned if keeper in self._failures), "")
            before, after = (planned, self._seats) if failed or self._over else (self._seats, planned)
            self._seats = after
            for index, keeper in enumerate(before):
                if index >= len(after) or after[index] is not keeper:
                    await self._leave(keeper, index)
            if failed or self._over:
                raise GaveUp(failed or self._failed or STOPPED)

    async def _start(self) -> bool:
        """Load the first child to learn what the model is, then the others. False: it failed, or was stopped."""
        if self._over:
            return False
        first = self._spawn(self._spec.instances[0], 0)
        self._seats = [first]
        await self._until(lambda: first.loaded is not None)
        self._loaded = first.loaded
        try:
            await self.set_instances(self._spec.instances)
        except GaveUp as gave_up:
            self._failed = self._failed or ("" if self._over else str(gave_up))
            return False
        return True

    def _keeper_for(self, index: int, placement: Placement, loaded: Loaded) -> Keeper:
        """The child for an instance: its present one, one that it may share, or a new one."""
        if index < len(self._seats) and self._seats[index].placement == placement:
            return self._seats[index]
        if loaded.threads:
            for keeper in self._keepers:
                if keeper.placement == placement and not keeper.stopping:
                    keeper.open(index)
                    return keeper
        return self._spawn(placement, index)

    def _spawn(self, placement: Placement, index: int) -> Keeper:
        keeper = Keeper(
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
        self._keepers.append(keeper)
        self._tasks.create_task(self._mind(keeper))
        return keeper

    async def _mind(self, keeper: Keeper) -> None:
        """Run one supervisor. If one that serves instances fails for good, the model fails."""
        text = await keeper.run()
        self._keepers.remove(keeper)
        self._replaced += keeper.replaced
        if text:
            self._failures[keeper] = text
            if keeper in self._seats:
                self._failed = self._failed or text
                self.stop()
        self._tell()

    async def _leave(self, keeper: Keeper, index: int) -> None:
        await keeper.drop(index)
        if not keeper.instances:
            keeper.stop()

    def _settled(self, keeper: Keeper, index: int) -> bool:
        return index in keeper.lanes or keeper in self._failures

    def _tell(self) -> None:
        self._changed.set()
        self._on_change()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, or for `stop`."""
        while not condition() and not self._over:
            self._changed.clear()
            await self._changed.wait()
