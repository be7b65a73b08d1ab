"""The worker's side of the engine child: starts, monitors and restarts it, and dispatches its events to listeners.

Each tick sends a ping unless a response is already outstanding; any frame from the child counts as a response. A
child that has not responded for a quarter of `hang_s` is stalled, for all of it dead. A child that was merely
suspended recovers as soon as it runs again.
"""

import asyncio
import os
import socket
import sys
import traceback
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, cast

import msgspec
import structlog

from forebay.core.errors import Code, Refusal
from forebay.core.model import ReplicaState
from forebay.core.prefix.journal import Journal
from forebay.engines.protocol import Begun, Delta, EngineInfo, EngineLoad, Event, Work
from forebay.wire.frames import FrameReader, FrameTooLarge
from forebay.worker.channel import (
    Broken,
    Cancel,
    Configure,
    Ping,
    Pong,
    Progress,
    Ready,
    Stop,
    ToChild,
    ToWorker,
    decode_to_worker,
    encode,
)

STALLED_SHARE = 0.25
"""Share of `hang_s` after which an engine that has not responded counts as stalled."""
TICKS_PER_HANG, TICK_S_MAX = 16, 1.0
QUICK_FAILURE_S = 10.0
"""A child that dies within this time after it became ready is a quick failure."""
QUICK_FAILURES_MAX = 5
BACKOFF_FIRST_S, BACKOFF_S_MAX = 0.5, 10.0
STOP_GRACE_S = 3.0
LAST_WORDS_S = 1.0
LAST_LINES, LINE_CHARS_MAX, READ_BYTES = 20, 1000, 65_536


class Listener(Protocol):
    """Submits work and receives its events. Every sequence ends with an event, with `on_lost`, or by being
    cancelled."""

    def on_events(self, events: Sequence[Event], now: float) -> None:
        """Events of its sequences that arrived together."""

    def on_lost(self, refusal: Refusal) -> None:
        """All of its sequences have failed; called once."""


class GaveUp(Exception):  # noqa: N818 - states the condition
    """The engine cannot be kept running; the text is the worker's exit message."""


@dataclass(frozen=True)
class Ended:
    """Why a child ended."""

    code: Code
    text: str


class EngineProcess:
    """Runs one engine child at a time. `run` owns it; the other methods are called on the same loop."""

    def __init__(
        self, configure: Configure, *, hang_s: float, load_timeout_s: float, log: structlog.stdlib.BoundLogger
    ) -> None:
        self._configure = configure
        self._hang_s = hang_s
        self._load_timeout_s = load_timeout_s
        self._tick_s = min(TICK_S_MAX, hang_s / TICKS_PER_HANG)
        self._log = log
        self._now = asyncio.get_running_loop().time  # looking up the loop takes a system call
        self._owners: dict[str, Listener] = {}
        self._link: _Link | None = None
        self._owed_since: float | None = None
        self._wake = asyncio.Event()
        self._stopping = False
        self._broken = ""
        self._ready_at: float | None = None
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.info: EngineInfo | None = None
        """What the engine supports; stays known while a dead child is replaced."""
        self.ready = False
        self.load = EngineLoad()
        self.blocks = Journal()
        """The contents of its prefix cache."""
        self.pid = 0
        self.restarts = 0
        self.tokens_total = 0

    @property
    def outstanding(self) -> int:
        """How many sequences have been submitted and have not ended."""
        return len(self._owners)

    @property
    def stalled_s(self) -> float:
        """How long the child has not responded."""
        return 0.0 if self._owed_since is None else max(0.0, self._now() - self._owed_since)

    @property
    def state(self) -> ReplicaState:
        """Warming, ready, or degraded while the engine is stalled."""
        if not self.ready:
            return ReplicaState.WARMING
        stalled = self.stalled_s > self._hang_s * STALLED_SHARE
        return ReplicaState.DEGRADED if stalled else ReplicaState.READY

    def require(self) -> EngineInfo:
        """What the engine supports. Raises `Refusal` while none is running."""
        if self.info is None:
            raise Refusal(Code.ENGINE_LOADING)
        if not self.ready:
            raise Refusal(Code.ENGINE_FAILED)
        return self.info

    def submit(self, works: Sequence[Work], listener: Listener) -> None:
        """Submit work. Raises `Refusal`, with no effect, while no engine is running."""
        self.require()
        assert self._link is not None
        for work in works:
            self._owners[work.id] = listener
        self._link.send(works)

    def cancel(self, ids: Iterable[str]) -> None:
        """Cancel sequences; no event of theirs follows. Ids that have ended are ignored."""
        known = [id for id in ids if self._owners.pop(id, None) is not None]
        if known and self._link is not None:
            self._link.send([Cancel(id) for id in known])

    def stop(self) -> None:
        """Make `run` stop the child and return."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Keep a child running until `stop`. Raises `GaveUp`."""
        failures = 0
        while not self._stopping:
            self._ready_at = None
            ended = await self._live()
            if self._stopping:
                return
            self._log.error("engine ended", reason=ended.text, last_lines=list(self._last_lines))
            if self.info is None and self._broken:
                raise GaveUp(f"the engine cannot load: {self._broken}")
            quick = self._ready_at is None or self._now() - self._ready_at < QUICK_FAILURE_S
            failures = failures + 1 if quick else 1
            if failures >= QUICK_FAILURES_MAX:
                raise GaveUp(f"the engine failed {failures} times in a row: {ended.text}")
            self.restarts += 1
            if failures > 1:
                self._wake.clear()
                await self._pause(min(BACKOFF_S_MAX, BACKOFF_FIRST_S * 2 ** (failures - 2)))

    async def _live(self) -> Ended:
        """The whole life of one child."""
        ours, theirs = socket.socketpair()
        self._wake.clear()
        self._broken = ""
        self._last_lines.clear()
        with ours, theirs:
            fd = theirs.fileno()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "forebay.worker.child", str(fd), str(os.getpid())),
                pass_fds=(fd,),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in a terminal is handled here, not by the engine
            )
            theirs.close()
            assert process.stderr is not None
            self.pid = process.pid
            async with asyncio.TaskGroup() as tasks:
                relay = tasks.create_task(self._relay(process.stderr))
                try:
                    ours.setblocking(False)
                    loop = asyncio.get_running_loop()
                    _, link = await loop.create_unix_connection(lambda: _Link(self), sock=ours.dup())
                    link.send([self._configure])
                    self._link = link
                    ended = await self._watch(link)
                    self._retire(ended)
                finally:
                    self._retire(Ended(Code.ENGINE_FAILED, "the worker stops"))
                    if process.returncode is None:
                        process.kill()
                    status = await process.wait()
                    with suppress(TimeoutError):  # its last output; a grandchild could hold the pipe open
                        async with asyncio.timeout(LAST_WORDS_S):
                            await relay
        return Ended(ended.code, f"{ended.text} ({_exit_text(status)})")

    async def _watch(self, link: "_Link") -> Ended:
        """Returns when the child has ended, must be killed, or we are stopping."""
        began = ticked = self._now()
        while True:
            await self._pause(self._tick_s if self.ready else min(self._tick_s, self._load_timeout_s))
            now = self._now()
            if self._owed_since is not None and now - ticked > self._tick_s + TICK_S_MAX:
                self._owed_since = now  # we did not run ourselves: what the child sent meanwhile is still unread
            ticked = now
            if link.lost is not None:
                return Ended(Code.ENGINE_FAILED, self._broken or link.lost)
            if self._stopping:
                await self._stop_child(link)
                return Ended(Code.DRAINING, "stopped")
            if not self.ready:
                if now - began > self._load_timeout_s:
                    self._broken = f"it did not load within {self._load_timeout_s:g} s"
                    return Ended(Code.ENGINE_FAILED, self._broken)
            elif self._owed_since is None:
                self._owed_since = now
                link.send([Ping()])
            elif now - self._owed_since > self._hang_s:
                return Ended(Code.ENGINE_STALLED, f"no sign of life for {now - self._owed_since:.1f} s")

    async def _stop_child(self, link: "_Link") -> None:
        link.send([Stop()])
        deadline = self._now() + STOP_GRACE_S
        while link.lost is None and self._now() < deadline:
            self._wake.clear()
            await self._pause(deadline - self._now())

    async def _pause(self, longest_s: float) -> None:
        """Wait until woken, at most that long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await self._wake.wait()

    def _retire(self, ended: Ended) -> None:
        """Take the child out of service: close the channel, fail its outstanding work."""
        if self._link is not None:
            self._link.close()
        self._link = None
        self.ready = False
        self._owed_since = None
        self.load = EngineLoad()
        self.blocks.clear()
        self.pid = 0
        lost = dict.fromkeys(self._owners.values())
        self._owners.clear()
        for listener in lost:
            listener.on_lost(Refusal(ended.code))

    async def _relay(self, stream: asyncio.StreamReader) -> None:
        """Log the child's output line by line, and keep the last lines."""
        rest = ""
        while data := await stream.read(READ_BYTES):
            *lines, rest = (rest + data.decode("utf-8", "replace")).split("\n")
            if len(rest) > LINE_CHARS_MAX:
                lines, rest = [*lines, rest], ""
            self._heard(lines)
        self._heard([rest])

    def _heard(self, lines: Iterable[str]) -> None:
        for line in filter(str.strip, lines):
            self._last_lines.append(line[:LINE_CHARS_MAX])
            self._log.info("engine output", line=line[:LINE_CHARS_MAX])

    def received(self, messages: Iterable[ToWorker]) -> None:
        """Process messages from the child."""
        self._owed_since = None
        for message in messages:
            if type(message) is Progress:  # nearly always; class patterns touch several times as much memory
                self.load = message.load
                if message.cached is not None:
                    self.blocks.apply(message.cached.stored, message.cached.removed)
                self._dispatch(message.events)
                continue
            match message:
                case Pong():
                    pass
                case Ready(info):
                    self.info = info
                    self.load = EngineLoad(kv_total_tokens=info.kv_total_tokens)
                    self.ready = True
                    self._ready_at = self._now()
                    self._log.info("engine ready", engine=info.engine, version=info.version, pid=self.pid)
                case Broken(text):
                    self._broken = text

    def lost(self) -> None:
        """The channel to the child is closed."""
        self._wake.set()

    def _dispatch(self, events: Sequence[Event]) -> None:
        now = self._now()
        if len(events) == 1:
            listener = self._owner_of(events[0])
            if listener is not None:
                self._tell(listener, events, now)
            return
        news: dict[Listener, list[Event]] = {}
        for event in events:
            listener = self._owner_of(event)
            if listener is None:
                continue
            if listener in news:
                news[listener].append(event)
            else:
                news[listener] = [event]
        for listener, its_events in news.items():
            self._tell(listener, its_events, now)

    def _owner_of(self, event: Event) -> Listener | None:
        """The listener of an event; None if it was cancelled while the event was in transit."""
        if type(event) is Delta:
            self.tokens_total += event.tokens
            return self._owners.get(event.id)
        if type(event) is Begun:
            return self._owners.get(event.id)
        return self._owners.pop(event.id, None)

    def _tell(self, listener: Listener, events: Sequence[Event], now: float) -> None:
        try:
            listener.on_events(events, now)
        except Exception:  # supervisor: an exception for one request must not cost the engine
            self._log.error("event handling failed", trace=traceback.format_exc())
            self.cancel([id for id, owner in self._owners.items() if owner is listener])
            listener.on_lost(Refusal(Code.INTERNAL))


class _Link(asyncio.Protocol):
    """The worker's end of the socket pair."""

    def __init__(self, owner: EngineProcess) -> None:
        self._owner = owner
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self.lost: str | None = None
        """Why nothing can arrive any more."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports have no common base class

    def data_received(self, data: bytes) -> None:
        try:
            frames = list(map(decode_to_worker, self._reader.feed(data)))
        except (FrameTooLarge, msgspec.DecodeError) as error:
            self._end(f"unreadable message from the engine process: {error}")
            return
        for messages in frames:
            if self.lost is None:
                self._owner.received(messages)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the engine process ended")

    def send(self, messages: Sequence[ToChild]) -> None:
        """Send messages as one frame."""
        if self._transport is not None and self.lost is None:
            self._transport.write(encode(messages))

    def close(self) -> None:
        """Stop receiving and sending."""
        self._end("closed")
        if self._transport is not None:
            self._transport.abort()

    def _end(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
            self._owner.lost()


def _exit_text(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
