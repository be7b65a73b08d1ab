"""An event loop whose time only moves when it is told to, and connections without sockets. Runs alike every time."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

TURNS_MAX = 20_000
"""So many turns without a pause are a circle."""
BEGINNING = 1000.0


class Host(Protocol):
    """Who listens on a port."""

    reach: str

    def accepted(self, pipe: "Pipe") -> None:
        """A connection was opened."""

    def received(self, pipe: "Pipe", data: bytes) -> None:
        """Bytes have come in."""

    def closed(self, pipe: "Pipe") -> None:
        """The other side has closed a connection."""


class VirtualLoop(asyncio.BaseEventLoop):
    """`spin` runs what is due; `advance` moves the time on, from timer to timer. What goes wrong is in `mishaps`."""

    # of asyncio's own loop, which its stubs keep to themselves
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _run_once: Callable[[], None]

    def __init__(self) -> None:
        super().__init__()
        self.at = BEGINNING
        self.hosts: dict[int, Host] = {}
        self.mishaps: list[BaseException] = []
        self.set_exception_handler(self._note)
        self._selector = self

    def time(self) -> float:
        return self.at

    # what BaseEventLoop leaves to its subclasses: there is nothing to wait for but timers

    def select(self, timeout: float | None) -> Iterable[Any]:
        return ()

    def _process_events(self, event_list: Iterable[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    # --- running it

    def spin(self) -> None:
        """Run until nothing more is due, and raise what went wrong."""
        asyncio._set_running_loop(self)
        try:
            for _ in range(TURNS_MAX):
                if not self._ready and self._next_at() > self.at:
                    break
                self._run_once()
            else:
                raise AssertionError("it goes round in circles")
        finally:
            asyncio._set_running_loop(None)
        if self.mishaps:
            raise self.mishaps[0]

    def act(self, what: Callable[[], object]) -> None:
        """Do something inside of the loop, and all that follows from it at once."""
        self.call_soon(what)
        self.spin()

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        until = self.at + seconds
        self.spin()
        while (due := self._next_at()) <= until:
            self.at = max(self.at, due)
            self.spin()
        self.at = until

    def _next_at(self) -> float:
        return min((timer.when() for timer in self._scheduled if not timer.cancelled()), default=math.inf)

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.mishaps.append(context.get("exception") or AssertionError(context["message"]))

    # --- connecting

    async def create_connection(  # type: ignore[override]
        self, factory: Callable[[], asyncio.Protocol], host: str, port: int, **more: object
    ) -> "tuple[Pipe, asyncio.Protocol]":
        """Reach a host, or not."""
        await asyncio.sleep(0)
        found = self.hosts.get(port)
        if found is None or found.reach == "refused":
            raise ConnectionRefusedError("refused")
        if found.reach == "silent":
            await self.create_future()
        protocol = factory()
        pipe = Pipe(self, protocol, found)
        protocol.connection_made(pipe)
        found.accepted(pipe)
        return pipe, protocol


class Tasks:
    """Stands for a task group that is open as long as the loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def create_task(self, what: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = self._loop.create_task(what)
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def __len__(self) -> int:
        return len(self._tasks)

    def _done(self, task: "asyncio.Task[Any]") -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._loop.mishaps.append(error)


class Pipe(asyncio.Transport):
    """The transport of a protocol under test. The other side is a `Host`, which calls `deliver` and `cut`."""

    def __init__(self, loop: VirtualLoop, protocol: asyncio.Protocol, host: Host) -> None:
        super().__init__()
        self._loop = loop
        self._protocol = protocol
        self._host = host
        self._held: list[bytes] = []
        self.closing = False
        self.reading = True
        self.backlog_bytes = 0

    def deliver(self, data: bytes) -> None:
        """Bytes reach the protocol, once it reads."""
        if self.closing:
            return
        if self.reading:
            self._protocol.data_received(data)
        else:
            self._held.append(data)

    def cut(self) -> None:
        """The other side is gone; what it sent before is not lost if nobody reads just now, unlike on a reset."""
        if not self.closing:
            self.closing = True
            self._loop.call_soon(self._protocol.connection_lost, None)

    def write(self, data: bytes) -> None:  # type: ignore[override]
        if not self.closing:
            self._host.received(self, data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.close()

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            self._host.closed(self)
            self._loop.call_soon(self._protocol.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True
        if self._held:
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        while self._held and self.reading and not self.closing:
            self._protocol.data_received(self._held.pop(0))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return self.backlog_bytes

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("192.0.2.1", 9) if name == "peername" else default
