"""Supervision of one child process of a model: start, health checks, restart and stop. It serves instances in lanes.

A child counts as hung if a batch makes no progress for `hang_s`, or if it does not answer a ping for that long while
requests are in flight. An idle child is not pinged: its exit is noticed at once.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Final

import structlog

from forebay.core.serving.errors import Kind, Refused
from forebay.engines.tensor.measures import Ledger
from forebay.engines.tensor.protocol import Loaded
from forebay.modelserver.process import placement
from forebay.modelserver.process.calls import ModelCall, cancel, withdraw
from forebay.modelserver.process.channel import Received
from forebay.modelserver.process.lane import Lane
from forebay.modelserver.process.link import UNREADABLE, Link
from forebay.modelserver.process.messages import (
    Broken,
    Call,
    Configure,
    Measure,
    Measured,
    Ping,
    Pong,
    Ready,
    Stop,
    ToServer,
    Withdraw,
)
from forebay.modelserver.process.placement import ChildSpec, Placement
from forebay.modelserver.process.values import Answer, OnCall
from forebay.modelserver.strays import VARIABLE, end_strays, new_mark

TICKS_PER_HANG: Final = 16
TICK_S_MAX: Final = 1.0
QUICK_FAILURE_S: Final = 10.0
"""A child that dies this soon after it became ready, without having finished a batch, is a quick failure."""
QUICK_FAILURES_MAX: Final = 5
BACKOFF_FIRST_S: Final = 0.5
BACKOFF_S_MAX: Final = 10.0
LAST_OUTPUT_S: Final = 1.0
"""A grandchild could hold stderr open for ever."""
LEFTOVERS_S: Final = 0.2
NAME_SHOWN: Final = 200
"""Characters of a model's name in the command line of its processes."""
LAST_LINES: Final = 50
"""Enough for a stack dump of all threads."""
LINE_CHARS_MAX: Final = 1000
LINES_PER_S_MAX: Final = 200
"""Log rate limit per child: unlimited output would cost the other models server time, and fill the disk."""
PAGE_BYTES: Final = os.sysconf("SC_PAGESIZE")


class Supervisor:
    """Supervises one child. `run` owns it; all other methods are called on the same loop."""

    def __init__(
        self,
        spec: ChildSpec,
        placement: Placement,
        instances: Iterable[int],
        *,
        hang_s: float,
        load_timeout_s: float,
        stop_grace_s: float,
        on_call: OnCall | None,
        on_change: Callable[[], None],
        log: structlog.stdlib.BoundLogger,
        ledger: Ledger,
    ) -> None:
        self.placement = placement
        self.instances = set(instances)
        self.lanes: dict[int, Lane] = {}
        """Lanes of the running child; empty while there is none, or it is being replaced."""
        self.loaded: Loaded | None = None
        self.pid = 0
        self.reason = "loading"
        """Why there are no lanes; empty while there are."""
        self.stopping = False
        """No child is to run any more."""
        self._spec = spec
        self._hang_s = hang_s
        self._load_timeout_s = load_timeout_s
        self._stop_grace_s = stop_grace_s
        self._tick_s = min(TICK_S_MAX, hang_s / TICKS_PER_HANG)
        self._on_call = on_call
        self._ledger = ledger
        self._measuring: asyncio.Future[None] | None = None
        self._on_change = on_change
        self._log = log
        self._control: Link | None = None
        self._calls: dict[int, ModelCall] = {}
        """Calls of the running child without a final response, by their number."""
        self._wake = asyncio.Event()
        self._life = 0
        self._end = ""
        """Why the child must be stopped."""
        self._broken = ""
        self._outgrown = ""
        self._ready_at = 0.0
        self._served = False
        self.replaced = 0
        """Number of unexpected exits."""
        self._owed_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> str:
        """Keep a child running until `stop`. Returns why that is not possible; empty once stopped."""
        loop = asyncio.get_running_loop()
        failures = 0
        while not self.stopping:
            self._ready_at, self._served = 0.0, False
            try:
                text = await self._live()
            except OSError as error:
                text = f"cannot start a process: {error}"
            if self.stopping:
                break
            self._log.error("model process ended", reason=text)
            if self.loaded is None:
                return text
            quick = not self._served and (not self._ready_at or loop.time() - self._ready_at < QUICK_FAILURE_S)
            failures = failures + 1 if quick else 1
            if failures >= QUICK_FAILURES_MAX:
                return f"the model process failed {failures} times in a row: {text}"
            self._retire(text)
            self.replaced += 1
            if failures > 1:
                await self._pause(min(BACKOFF_S_MAX, BACKOFF_FIRST_S * 2 ** (failures - 2)))
        return ""

    def stop(self) -> None:
        """Stop the child and `run`; open requests fail."""
        self.stopping = True
        self._wake.set()

    def open(self, instance: int) -> None:
        """Add an instance to this child. Raises `OSError`."""
        if not self.reason:
            self._open(instance)
        self.instances.add(instance)

    async def drop(self, instance: int) -> None:
        """Remove an instance once its batches have finished."""
        self.instances.discard(instance)
        lane = self.lanes.get(instance)
        if lane is not None:
            await lane.drained()
            lane.close(Refused(Kind.UNAVAILABLE, "the instance has ended"))
            if self.lanes.get(instance) is lane:
                del self.lanes[instance]

    def measure(self) -> "asyncio.Future[None] | None":
        """Request the model's custom metrics: done once they are in the ledger or cannot come. None: no metrics."""
        if self._control is None or self.reason or self.loaded is None or not self.loaded.measures:
            return None
        if self._measuring is None:
            self._measuring = asyncio.get_running_loop().create_future()
            self._control.send(Measure())
        return self._measuring

    def stalled_s(self, now: float) -> float:
        """How long, by the loop's clock, the child has not answered a ping."""
        return 0.0 if self._owed_since is None else max(0.0, now - self._owed_since)

    def watch(self) -> None:
        """Start health checks; they run until nothing is in flight."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(loop.time() + self._tick_s, self._tick, loop.time() + self._tick_s)

    async def _live(self) -> str:
        """Run one child from start to exit; returns why it ended."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._end = self._broken = self._outgrown = ""
        self._life += 1
        self._wake.clear()
        output = _OutputLog(self._log)
        mark = new_mark()
        with ours, theirs:
            process = _spawn(theirs.fileno(), self.placement, mark, self._spec)
            theirs.close()
            lost = partial(self._lost, self._life)
            ended = _Ended(process.pid, lost)
            how = ""
            try:
                stderr, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: output, process.stderr)
                self.pid = process.pid
                await self._serve(Link(ours, self._on_packet, lost), ended)
            finally:
                with suppress(ProcessLookupError):
                    # not reaped yet, so the process group id cannot have been reused
                    os.killpg(process.pid, signal.SIGKILL)
                for lane in self.lanes.values():
                    lane.closing = True
                # its exit may take time, and clients wait for the failure of their batch
                with suppress(TimeoutError):
                    async with asyncio.timeout(LEFTOVERS_S):
                        await ended.seen.wait()
                        how = f" ({_exit_text(process.wait())})"
                self._retire((self._end or "the server stops") + how)
                await ended.seen.wait()
                ended.close()
                status = process.wait()
                self.pid = 0
                strays = await asyncio.to_thread(end_strays, mark)
                if strays:
                    self._log.info("killed processes that the model left behind", count=strays)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_OUTPUT_S):
                await output.ended.wait()
        stderr.close()
        if self._broken and self.loaded is None:
            return self._broken
        return f"{self._end} ({_exit_text(status)}){output.text}"

    async def _serve(self, control: Link, ended: "_Ended") -> None:
        """Serve until the child has ended or must be stopped, or `stop` was called."""
        loop = asyncio.get_running_loop()
        self._control = control
        spec, config = self._spec, self._spec.config
        # any packet carries the leases
        control.channel.on_return = partial(loop.call_soon_threadsafe, control.send, Ping())
        first = min(self.instances, default=0)
        control.send(_told(spec, first))
        await self._pause(self._load_timeout_s)
        if self.reason and not self._end and not self.stopping:
            self._end = self._broken = f"it did not load within {self._load_timeout_s:g} s"
        while not self._end and not self.stopping:
            await self._pause(None)
        if not self._end:
            self._end = "stopped"
            self._close_lanes(Refused(Kind.UNAVAILABLE, f"model '{config.name}' is being unloaded"))
            if not self.reason:
                control.send(Stop())
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._stop_grace_s):
                        await ended.seen.wait()

    async def _pause(self, longest_s: float | None) -> None:
        """Wait for at most `longest_s`, or until woken."""
        if self.stopping:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await self._wake.wait()
        self._wake.clear()

    def _on_packet(self, received: Received[ToServer]) -> None:
        self._owed_since = None
        match received.message:
            case Ready(loaded):
                self.loaded = loaded
                self.reason = ""
                self._ready_at = asyncio.get_running_loop().time()
                try:
                    for instance in sorted(self.instances):
                        self._open(instance)
                except OSError as error:
                    self._lost(self._life, f"no channel for an instance: {error}")
                self._wake.set()
                self._on_change()
            case Broken(text):
                self._broken = text
            case Pong():
                pass
            case Measured(families):
                self._ledger.hear(self.pid, families)
                self._measured()
            case Call() as call if self._control is not None:
                self._called(ModelCall(call, received, self._control, self._calls))
            case Withdraw(number):
                cancel(self._calls, number)
            case unexpected:
                self._lost(self._life, f"{UNREADABLE}: {type(unexpected).__name__}")

    def _called(self, call: ModelCall) -> None:
        if self._on_call is not None:
            self._on_call(call)
        else:
            call.respond(Answer(error=Refused(Kind.UNSUPPORTED, "models cannot call other models here")), True)

    def _open(self, instance: int) -> None:
        assert self._control is not None
        self.lanes[instance] = Lane(instance, self._control, partial(self._lost, self._life))

    def _lost(self, life: int, why: str) -> None:
        """The child of that life is lost. Late events of an earlier child are ignored."""
        if life == self._life and not self._end:
            self._end = self._broken or why
            self._wake.set()

    def _retire(self, why: str) -> None:
        """Take the child out of service: its open requests fail."""
        self.reason = why
        self._ledger.end(self.pid)
        self._measured()
        self._owed_since = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._control is not None:
            self._control.close()
            self._control = None
        withdraw(self._calls)
        # a late response to a call of the old child must not end one of its successor, which reuses numbers
        self._calls = {}
        text = f"model '{self._spec.config.name}': {why}; retry the request"
        self._close_lanes(Refused(Kind.UNAVAILABLE, text))
        self._on_change()

    def _measured(self) -> None:
        asked, self._measuring = self._measuring, None
        if asked is not None:
            asked.set_result(None)

    def _close_lanes(self, refused: Refused) -> None:
        lanes, self.lanes = self.lanes, {}
        for lane in lanes.values():
            self._served = self._served or lane.served
            lane.close(refused)

    def _tick(self, due: float) -> None:
        """Check that what is in flight makes progress."""
        now = asyncio.get_running_loop().time()
        self._timer = None
        control = self._control
        if control is None or self._end:
            return
        lanes = self.lanes.values()
        if now - due > TICK_S_MAX:
            if self._owed_since is not None:
                self._owed_since = now  # the server itself was stalled: packets from the child may still be unread
        elif any(lane.stuck_s(now) > self._hang_s for lane in lanes):
            self._lost(self._life, f"a batch made no progress for {self._hang_s:g} s")
        elif self._owed_since is None:
            self._owed_since = now
            control.send(Ping())
        elif now - self._owed_since > self._hang_s:
            self._lost(self._life, f"no answer to a ping for {now - self._owed_since:.1f} s")
        if self._spec.rss_bytes_max and not self._outgrown:
            self._weigh()
        if any(lane.open for lane in lanes):
            self.watch()
        else:
            self._owed_since = None
            if self._outgrown:
                self._lost(self._life, self._outgrown)

    def _weigh(self) -> None:
        """A child that has grown too large takes no more batches, and is replaced once it has none."""
        own = own_bytes(self.pid)
        if own > self._spec.rss_bytes_max:
            self._outgrown = f"it has {own} bytes of memory, more than {self._spec.rss_bytes_max}"
            for lane in self.lanes.values():
                lane.closing = True
            self._on_change()


class _Ended:
    """Notices that a process has ended, without reaping it."""

    def __init__(self, pid: int, on_end: Callable[[str], None]) -> None:
        self.seen = asyncio.Event()
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._late: asyncio.TimerHandle | None = None
        self._fd = os.pidfd_open(pid)
        self._loop.add_reader(self._fd, self._readable)

    def _readable(self) -> None:
        self._loop.remove_reader(self._fd)
        self.seen.set()
        # first read its last packets, up to the end of the channel; a process that it forked may hold that open
        self._late = self._loop.call_later(LEFTOVERS_S, self._on_end, "the model process ended")

    def close(self) -> None:
        """Stop watching."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        if self._late is not None:
            self._late.cancel()


class _OutputLog(asyncio.Protocol):
    """Logs what the child and its libraries print, and keeps the last lines."""

    def __init__(self, log: structlog.stdlib.BoundLogger) -> None:
        self.ended = asyncio.Event()
        self._log = log
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._rest = ""
        self._loop = asyncio.get_running_loop()
        self._second = -1
        self._room = 0
        """Lines that may still be logged in this second."""

    @property
    def text(self) -> str:
        """The last lines, to append to a reason."""
        return "".join(f"\n{line}" for line in self._lines)

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data.decode("utf-8", "replace")).split("\n")
        if len(self._rest) > LINE_CHARS_MAX:
            lines, self._rest = [*lines, self._rest], ""
        self._heard(lines)

    def connection_lost(self, exc: Exception | None) -> None:
        self._heard([self._rest])
        self.ended.set()

    def _heard(self, lines: Iterable[str]) -> None:
        told = [line[:LINE_CHARS_MAX] for line in lines if line.strip()]
        self._lines.extend(told[-LAST_LINES:])
        second = int(self._loop.time())
        if second != self._second:
            self._second, self._room = second, LINES_PER_S_MAX
        for line in told[: self._room]:
            self._log.info("model output", line=line)
        if 0 < self._room < len(told):
            self._log.warning("model output over the log rate limit: dropping the rest of this second")
        self._room = max(0, self._room - len(told))


def _told(spec: ChildSpec, instance: int) -> Configure:
    steps = tuple([_told(step, instance) for step in spec.steps])
    return Configure(spec.backend, spec.config, str(spec.folder), instance, spec.document, steps)


def _spawn(fd: int, where: Placement, mark: str, spec: ChildSpec) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        (
            *(sys.executable, "-m", "forebay.modelserver.process.child", str(fd), str(os.getpid())),
            *(placement.as_argument(where), _shown(spec)),
        ),
        pass_fds=(fd,),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # kills reach what the model starts; no session of its own, or `nice` would not compare with the server
        process_group=0,
        env={**placement.environment(where, os.environ), VARIABLE: mark},
    )


def _shown(spec: ChildSpec) -> str:
    """Model and version, for `ps`."""
    return f"{spec.config.name[:NAME_SHOWN]}:{spec.folder.name}".replace("\0", "")


def own_bytes(pid: int) -> int:
    """Private anonymous memory of a process, where leaks show. 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            _, resident, shared, *_ = file.read().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * PAGE_BYTES


def _exit_text(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
