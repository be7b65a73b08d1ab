"""A worker with the product's shell and engine supervision, and the synthetic engine.

Only the start of the engine process is replaced: messages are passed by calls instead of a socket pair.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

import structlog

from forebay import __version__
from forebay.core.errors import Code, Refusal
from forebay.core.model import WorkerSpec
from forebay.engines.protocol import Detokenize, Embed, Event, Failed, Generate, Tokenize
from forebay.engines.synthetic import SyntheticEngine
from forebay.net.server import Exchange
from forebay.obs.metrics import Metrics
from forebay.sim.full.event_log import EventLog
from forebay.sim.full.machine import ExitError, Process
from forebay.wire.http1 import JSON
from forebay.worker.call import EVENT_STREAM
from forebay.worker.channel import Broken, Cancel, Configure, Ping, Pong, Progress, Ready, Stop, ToChild, ToWorker
from forebay.worker.engine_process import Ended, EngineProcess, GaveUp, _Link
from forebay.worker.meters import Meters
from forebay.worker.serve import run
from forebay.worker.shell import Shell

TIMER_S: Final = 1e-6
"""Timers fire late by this much: one that is early by a rounding error would be set again forever."""
JUNK: Final = b"\x00\xff{]data:\n"


@dataclass(frozen=True, slots=True)
class Nature:
    """The faults of a revision, on every replica."""

    slow: float = 1.0
    """Factor of engine step times."""
    fails: float = 0.0
    """Share of requests that its engine fails."""
    dies: float = 0.0
    """Share of requests at which its process ends."""
    breaks: str = ""
    """Why it cannot be loaded; empty: it can."""
    load_s: float = 0.0
    """Additional load time."""


SOUND: Final = Nature()


class Health:
    """The faults of a replica. They outlive the process, as a bad machine does."""

    def __init__(self) -> None:
        self.nature = SOUND
        """The nature of the current or last revision."""
        self.chance = Random(0)  # noqa: S311 - chance that can be repeated
        """Random numbers of the current or last process."""
        self.slow = 1.0
        """Factor of engine step times."""
        self.hung = False
        """The engine hangs."""
        self.garbage = ""
        """It responds with garbage: to everything (`all`), or only to requests (`work`)."""
        self.listen_s = 0.2
        """Time from start to listening."""
        self.load_s = 0.5
        """Time from then until its engine is ready."""
        self.breaks = ""
        """Why its engine cannot be loaded; empty: it can."""
        self.engine: LocalEngine | None = None
        """The current or last engine."""
        self.shell: WatchedShell | None = None
        """The current shell; None: there is none."""


class _Child(_Link):
    """The engine child, and the link to it."""

    def __init__(self, owner: "LocalEngine", health: Health, configure: Configure) -> None:
        super().__init__(owner)
        self._health = health
        self._loop = asyncio.get_running_loop()
        self._engine = SyntheticEngine(configure.artifact, configure.settings)
        self._inbox: list[ToChild] = []
        self._clock = 0.0
        self._clock_at = self._loop.time()
        self._slow = health.nature.slow
        self._timer: asyncio.Handle | None = self._loop.call_later(health.load_s + health.nature.load_s, self._loaded)

    def send(self, messages: Sequence[ToChild]) -> None:
        """Receive messages."""
        self._inbox += messages
        self.wake()

    def close(self) -> None:
        """Kill the child."""
        super().close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def die(self) -> None:
        """End the child on its own."""
        if self.lost is None:
            self.connection_lost(None)
        self.close()

    def wake(self) -> None:
        """Schedule pending work."""
        if self.lost is None and not self._health.hung and isinstance(self._owner, LocalEngine) and self._owner.ready:
            self._set_timer(0.0)

    def _set_timer(self, wait_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(wait_s, self._turn)

    def _tell(self, *messages: ToWorker) -> None:
        if self.lost is None:
            self._owner.received(messages)

    def _loaded(self) -> None:
        self._timer = None
        breaks = self._health.breaks or self._health.nature.breaks
        if breaks:
            self._tell(Broken(breaks))
            self.die()
            return
        self._tell(Ready(self._engine.load()))
        self.wake()

    def _now(self) -> float:
        """The engine's own time, which passes more slowly if it is slow."""
        now = self._loop.time()
        self._clock += (now - self._clock_at) / self._slow
        self._clock_at, self._slow = now, self._health.slow * self._health.nature.slow
        return self._clock

    def _turn(self) -> None:
        self._timer = None
        if self._health.hung:
            return
        inbox, self._inbox = self._inbox, []
        events: list[Event] = []
        for message in inbox:
            match message:
                case Generate(id) if self._health.chance.random() < self._health.nature.fails:
                    events.append(Failed(id, Code.REQUEST_FAILED, "it fails now and then"))
                case Generate() | Embed() | Tokenize() | Detokenize():
                    try:
                        answer = self._engine.add(message, self._now())
                        if answer is not None:
                            events.append(answer)
                    except Refusal as refusal:
                        events.append(Failed(message.id, refusal.code, refusal.text, refusal.param))
                case Cancel(id):
                    self._engine.cancel(id)
                case Ping():
                    self._tell(Pong())
                case Stop():
                    self.die()
                    return
                case Configure():
                    raise AssertionError("configured twice")
        step = self._engine.step(self._now())
        events += step.events
        self._tell(Progress(tuple(events), step.load, step.cached))
        if step.wait_s is not None and self.lost is None:
            self._set_timer(step.wait_s * self._slow + TIMER_S)


class LocalEngine(EngineProcess):
    """Supervises a child that runs on the same loop."""

    def __init__(self, spec: WorkerSpec, health: Health, log: structlog.stdlib.BoundLogger) -> None:
        configure = Configure(spec.engine, spec.artifact, {"task": spec.task.value, **spec.settings})
        super().__init__(configure, hang_s=spec.engine_hang_s, load_timeout_s=spec.engine_load_timeout_s, log=log)
        self._health = health
        self.child: _Child | None = None

    async def _live(self) -> Ended:
        self._wake.clear()
        self._broken = ""
        self._last_lines.clear()
        self.child = self._link = child = _Child(self, self._health, self._configure)
        try:
            ended = await self._watch(child)
            self._retire(ended)
        finally:
            self._retire(Ended(Code.ENGINE_FAILED, "the worker stops"))
        return ended


class WatchedShell(Shell):
    """Records requests, and responds with garbage if told to."""

    health: Health
    event_log: EventLog
    node: str
    die: Callable[[], object]

    @property
    def working(self) -> list[str]:
        """Ids of requests in progress."""
        return sorted(call.request_id for call in self._calls)

    def handle(self, exchange: Exchange) -> None:
        """Handle one exchange."""
        id = exchange.header(b"x-request-id")
        if exchange.method == b"POST" and id is not None:
            self.event_log.note("work", self.node, id.decode(), exchange.header(b"x-forebay-continue") is not None)
            if self.health.chance.random() < self.health.nature.dies:
                self.die()
                return
        garbage = self.health.garbage
        if garbage == "all" or (garbage and exchange.method == b"POST"):
            _garbage(exchange)
        else:
            super().handle(exchange)


def _garbage(exchange: Exchange) -> None:
    """Send something that only looks like a response."""
    if exchange.method == b"POST" and b'"stream":true' in exchange.body:
        exchange.start(200, [EVENT_STREAM])
        exchange.write(JUNK)
        exchange.abort()
    else:
        exchange.respond(200, [JSON], JUNK)


async def work(
    process: Process,
    health: Health,
    event_log: EventLog,
    log: structlog.stdlib.BoundLogger,
    die: Callable[[], object],
) -> None:
    """Run a worker on this node until it is asked to stop; `die` ends its process at once. Raises `ExitError`."""
    spec = process.spec
    assert isinstance(spec, WorkerSpec)
    health.chance = Random(process.node)  # noqa: S311 - chance that can be repeated
    await asyncio.sleep(health.listen_s)
    engine = health.engine = LocalEngine(spec, health, log)
    shell = WatchedShell(spec, engine, Meters(Metrics(), spec, __version__), log)
    shell.health, shell.event_log, shell.node, shell.die = health, event_log, process.node, die
    health.shell = shell
    stop = asyncio.Event()
    process.signal = stop.set
    if process.asked:
        stop.set()
    try:
        await run(spec, log, stop, engine, shell)
    except GaveUp as error:
        raise ExitError(str(error)) from error
    except ExceptionGroup as errors:
        if errors.subgroup(GaveUp) is None:
            raise
        raise ExitError(str(errors)) from errors
    finally:
        health.shell = None
