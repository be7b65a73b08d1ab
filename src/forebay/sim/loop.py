"""An event loop on virtual time: it jumps from timer to timer, and every run is deterministic.

asyncio leaves three things undetermined, which are fixed here. Callbacks that are due at one moment run in the order
of scheduling. Sets of tasks do not depend on addresses, as `TaskGroup` and `asyncio.wait` iterate over such sets
(those of bare futures still do). Tasks are named by their number in this loop. There are no signals, sockets or
processes; connections come from `forebay.sim.network`. Work for threads runs at once and takes no time.
"""

import asyncio
import contextvars
import gc
from collections import deque
from collections.abc import Callable, Coroutine
from heapq import heapify, heappop, heappush
from itertools import count
from pathlib import PurePath
from random import Random
from typing import Any, Final, NoReturn, Protocol, TypeVar, TypeVarTuple

from forebay.obs.clock import standing_in

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

EPOCH_S: Final = 1_767_225_600.0
"""Wall clock at the start of a simulation: 2026-01-01, 00:00 UTC."""
ROUNDS_MAX: Final = 1_000_000
"""More rounds of callbacks than this without time passing are an endless loop."""
TIMERS_SWEPT_MIN: Final = 1024
"""Cancelled timers are removed once there are more timers than this, and twice as many as after the last removal."""
WIND_UP_S_MAX: Final = 3600.0
"""Virtual time that cancelled tasks have to finish."""
WIND_UP_ROUNDS_MAX: Final = 10
"""How often tasks that were started while others ended are cancelled, too."""
ERRORS_MAX: Final = 100
WAITING_SHOWN_MAX: Final = 20


class Standstill(Exception):  # noqa: N818 - states the condition
    """The simulation cannot continue. `waiting`: one line per unfinished task, with where it waits."""

    def __init__(self, why: str, waiting: tuple[str, ...]) -> None:
        self.waiting = waiting
        shown = waiting[:WAITING_SHOWN_MAX]
        more = [f"and {len(waiting) - len(shown)} more"] * (len(waiting) > len(shown))
        super().__init__("\n  ".join((why, *shown, *more)))


class Deadlock(Standstill):
    """All tasks wait, and no timer is set that could wake one."""


class OutOfTime(Standstill):
    """Virtual time has reached its limit, or has stopped advancing."""


class Wires(Protocol):
    """The simulated network that provides connections."""

    async def create_server(
        self, factory: Callable[[], asyncio.BaseProtocol], host: str | None, port: int, **options: object
    ) -> asyncio.AbstractServer:
        """Listen, like the event loop method of the same name."""

    async def create_connection(
        self, factory: Callable[[], asyncio.BaseProtocol], host: str, port: int, **options: object
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Connect, like the event loop method of the same name."""


class _Call(asyncio.TimerHandle):
    """A scheduled callback. It uses nothing of asyncio's own handle, as this one is faster to create."""

    __slots__ = ("args", "at", "callback", "context")

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
        at: float,
    ) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.context = contextvars.copy_context() if context is None else context
        self.at = at

    def cancel(self) -> None:
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return self.at

    def __repr__(self) -> str:
        return f"<{self.callback!r} at {self.at:g} s>"

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class _Task(asyncio.Task[Any]):
    """A task whose order in sets does not depend on memory addresses."""

    def __init__(
        self,
        number: int,
        what: Coroutine[Any, Any, Any],
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context | None,
    ) -> None:
        self.number = number  # asyncio hashes a task before its own constructor returns
        super().__init__(what, loop=loop, name=f"Task-{number}", context=context)

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module. `time()` runs from 0 to `seconds_max`. Use `run`.

    Of asyncio's undocumented parts, it relies only on `_run_once` and `_stopping` of its base.
    """

    _stopping: bool

    def __init__(self, seconds_max: float, network: Wires | None = None) -> None:
        super().__init__()
        self.network = network
        self.errors: list[BaseException] = []
        """Unhandled exceptions: of callbacks, and of tasks whose result was never retrieved."""
        self._now = 0.0
        self._seconds_max = seconds_max
        self._calls: deque[_Call] = deque()
        self._held: Callable[[contextvars.Context], bool] | None = None
        self._kept: list[_Call] = []
        self._timers: list[tuple[float, int, _Call]] = []
        self._number = count().__next__
        self._task_number = count(1).__next__
        self._swept_at = TIMERS_SWEPT_MIN
        self._winding_up = False
        self.set_task_factory(self._make_task)
        self.set_exception_handler(VirtualLoop._note)

    # --- scheduling

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Run after all callbacks that are already due."""
        call = _Call(callback, args, context, self._now)
        self._calls.append(call)
        return call

    def hold(self, held: Callable[[contextvars.Context], bool] | None) -> None:
        """Suspend callbacks in matching contexts, as in a stopped process; None: suspend none.

        Suspended callbacks are re-evaluated at once, in their original order.
        """
        self._held = held
        kept, self._kept = self._kept, []
        self._calls.extend(kept)

    call_soon_threadsafe = call_soon  # there are no threads

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Run at a virtual time; calls for the same time run in the order of these calls."""
        call = _Call(callback, args, context, when)
        heappush(self._timers, (when, self._number(), call))
        return call

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Run after a delay in virtual seconds."""
        when = self._now + delay
        call = _Call(callback, args, context, when)
        heappush(self._timers, (when, self._number(), call))
        return call

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Run it at once, in this thread."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def add_signal_handler(self, sig: int, callback: Callable[[*Ts], object], *args: *Ts) -> NoReturn:
        """Raises RuntimeError."""
        raise RuntimeError("there are no signals in a simulation")

    # --- connecting

    async def create_server(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str | None = None,
        port: int = 0,
        **options: object,
    ) -> asyncio.AbstractServer:
        """Listen on the simulated network. Raises OSError like that of asyncio."""
        return await self._wires().create_server(protocol_factory, host, port, **options)

    async def create_connection(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str,
        port: int,
        **options: object,
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Connect over the simulated network. Raises OSError like that of asyncio."""
        return await self._wires().create_connection(protocol_factory, host, port, **options)

    def _wires(self) -> Wires:
        if self.network is None:
            raise RuntimeError("this simulation has no network")
        return self.network

    # --- running

    def _run_once(self) -> None:
        """Run until stopped. asyncio's own version returns after every round, which costs more than most
        callbacks."""
        calls, timers = self._calls, self._timers
        take = calls.popleft
        rounds = 0
        while True:
            rounds += 1
            if rounds > ROUNDS_MAX:
                raise OutOfTime(
                    f"time does not advance at {self._now:g} s while callbacks keep running", self.waiting()
                )
            if not calls and not self._stopping:
                rounds = 0
                self._leap()
            while timers and timers[0][0] <= self._now:
                calls.append(heappop(timers)[2])
            for _ in range(len(calls)):  # not those added meanwhile: a round is what is due together
                call = take()
                callback = call.callback
                if callback is None:
                    continue
                if self._held is not None and self._held(call.context):
                    self._kept.append(call)
                    continue
                try:
                    call.context.run(callback, *call.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler({"message": f"{callback!r} failed", "exception": error})
            if self._stopping:
                return

    def _leap(self) -> None:
        """Advance time to the next timer."""
        timers = self._timers
        if len(timers) > self._swept_at:
            timers[:] = [timer for timer in timers if timer[2].callback is not None]
            heapify(timers)
            self._swept_at = max(TIMERS_SWEPT_MIN, 2 * len(timers))
        while timers and timers[0][2].callback is None:
            heappop(timers)
        if not timers:
            raise Deadlock(f"all tasks wait, and no timer is set, at {self._now:g} s", self.waiting())
        at = timers[0][0]
        if at > self._seconds_max:
            raise OutOfTime(f"not finished after {self._seconds_max:g} s of virtual time", self.waiting())
        self._now = max(self._now, at)

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        what: Any,  # the type in asyncio's stubs is private
        context: contextvars.Context | None = None,
    ) -> _Task:
        return _Task(self._task_number(), what, loop, context)

    def waiting(self) -> tuple[str, ...]:
        """One line per unfinished task: its name, its coroutine, and the line where it waits."""
        return tuple(f"{task.get_name()}: {_place(task.get_coro())}" for task in self._tasks())

    def _tasks(self) -> list[asyncio.Task[Any]]:
        return sorted(asyncio.all_tasks(self), key=hash)

    @staticmethod
    def _note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Record the error and end the run: nothing after it is meaningful."""
        assert isinstance(loop, VirtualLoop)
        message = context["message"]
        error = context.get("exception")
        if error is None:
            error = RuntimeError(f"{message} ({context.get('task') or context.get('transport') or 'no details'})")
        if len(loop.errors) < ERRORS_MAX and error not in loop.errors:
            error.add_note(f"{message} at {loop.time():g} s of virtual time")
            loop.errors.append(error)
        if not loop._winding_up and loop.is_running():
            loop.stop()

    def wind_up(self) -> None:
        """Cancel the remaining tasks and let them end; their errors are in `errors`. Then close."""
        self._winding_up = True
        self.hold(None)
        self._seconds_max = self._now + WIND_UP_S_MAX
        try:
            for _ in range(WIND_UP_ROUNDS_MAX):
                left = self._tasks()
                if not left:
                    break
                self._cancel(left)
            self.run_until_complete(self.shutdown_asyncgens())
        except Standstill as error:
            self.errors.append(error)
        finally:
            self._calls.clear()
            self._timers.clear()
            # failed tasks that nothing awaited report it when they are collected: now, not in the next run
            gc.collect()
            self.close()

    def _cancel(self, tasks: list[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        for task in tasks:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                error.add_note(f"raised by {task.get_name()} when it was cancelled at the end")
                self.errors.append(error)


def run(main: Coroutine[Any, Any, T], *, seconds_max: float, network: Wires | None = None, seed: int = 0) -> T:
    """Run `main` on virtual time to its end, cancel remaining tasks, and return its result.

    The process's wall clock shows virtual time, and identifiers are derived from `seed`. Raises what `main` raises,
    `Deadlock`, `OutOfTime` after `seconds_max` of virtual time, and any unhandled error of callbacks and tasks, the
    first of which ends the run. Several errors are raised as an exception group.
    """
    if asyncio._get_running_loop() is not None:
        main.close()
        raise RuntimeError("a simulation cannot run inside a running event loop")
    loop = VirtualLoop(seconds_max, network)
    ids = Random(f"ids {seed}")  # noqa: S311 - reproducible
    gc.freeze()  # so that the final collection only scans what the run has left
    with standing_in(lambda: EPOCH_S + loop.time(), lambda size_bytes: ids.randbytes(size_bytes).hex()):
        task = loop.create_task(main)
        task.add_done_callback(lambda _: loop.stop())
        try:
            loop.run_forever()
        except Standstill as stands_still:
            loop.errors.append(stands_still)
        finally:
            finished = task.done()
            try:
                loop.wind_up()
            finally:
                gc.unfreeze()
    errors = loop.errors
    if finished and not task.cancelled():
        error = task.exception()
        errors[:0] = [error] if error is not None and error not in errors else []
    if len(errors) > 1:
        raise BaseExceptionGroup("several errors in the simulation", errors)
    if errors:
        raise errors[0]
    return task.result()


def _place(what: object) -> str:
    """The nested coroutines that it waits in, outermost first, with file and line of the innermost."""
    names, line = [], ""
    while (frame := getattr(what, "cr_frame", None) or getattr(what, "gi_frame", None)) is not None:
        names.append(frame.f_code.co_qualname)
        line = f" ({PurePath(frame.f_code.co_filename).name}:{frame.f_lineno})"
        what = getattr(what, "cr_await", None) or getattr(what, "gi_yieldfrom", None)
    return " > ".join(names) + line
