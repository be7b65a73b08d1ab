"""A replica as gateways see it: an engine model behind connections.

Requests are the bytes that a gateway sends to a worker, responses those of a worker's event stream: one event with
the first token, one at the end. Everything in between is skipped.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Final

from forebay.core.model import BlockNews, LoadReport, ReplicaState
from forebay.core.prefix.journal import Journal
from forebay.sim.engine import EngineEvent, Job, JobTooLarge, Kind, Replica

ID: Final = b"x-request-id: "
HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    b"trailer: x-forebay-usage\r\n\r\n"
)
FIRST: Final = b'data: {"id":"sim","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
LAST: Final = b'data: {"id":"sim","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
ANSWER_BEGINS: Final = b"%b%x\r\n%b\r\n" % (HEAD, len(FIRST), FIRST)
ANSWER_ENDS: Final = b"%x\r\n%b\r\n0\r\nx-forebay-usage: %%d,%%d,%%d\r\n\r\n" % (len(LAST), LAST)
TOO_LARGE: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: 61\r\n\r\n"
    b'{"error":{"code":"context_length_exceeded","type":"invalid"}}'
)


class Port(asyncio.Transport):
    """A gateway's connection to a replica: one request at a time."""

    def __init__(self, node: "Node", protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.node = node
        self.protocol = protocol
        self.job: Job | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """A request arrives."""
        self.node.take(self, bytes(data))

    def abort(self) -> None:
        """The gateway cancels the request."""
        self.node.leave(self)

    close = abort

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        """No effect: simulated clients read immediately."""

    resume_reading = pause_reading


class Node:
    """One replica. `jobs`: the job of each request id; `done` is called with finished ones."""

    def __init__(
        self,
        replica: str,
        engine: Replica,
        jobs: dict[int, Job],
        *,
        room: int,
        reports_blocks: bool,
        done: Callable[[EngineEvent], None],
    ) -> None:
        self.id = replica
        self.engine = engine
        self.version = 0
        """Increases with every change that a load report would show."""
        self._jobs = jobs
        self._room = room
        self._reports_blocks = reports_blocks
        self._done = done
        self._ports: dict[int, Port] = {}
        self._journal = Journal()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf
        self._busy = False

    @property
    def idle(self) -> bool:
        """Whether it has no requests."""
        return not self._ports

    def take(self, port: Port, request: bytes) -> None:
        """A gateway sends a request."""
        start = request.index(ID) + len(ID)
        job = self._jobs[int(request[start : request.index(b"\r", start)])]
        now = self._loop.time()
        if self.engine.next_at <= now and not self._busy:
            self._advance(now)
        try:
            self.engine.offer(job, now)
        except JobTooLarge:
            self._loop.call_soon(port.protocol.data_received, TOO_LARGE)
            return
        port.job = job
        self._ports[job.id] = port
        self.version += 1
        if not self._busy:
            self._set(now)

    def leave(self, port: Port) -> None:
        """A gateway closes the connection."""
        job, port.job = port.job, None
        if job is None:
            return
        del self._ports[job.id]
        now = self._loop.time()
        self.engine.cancel(job.id, now)
        self.version += 1
        if not self._busy:
            self._set(now)

    def report(self, model: str, revision: str) -> LoadReport:
        """Its load report."""
        self._catch_up()
        engine = self.engine
        running, waiting = engine.running, engine.waiting
        return LoadReport(
            self.id, 1, model, revision, ReplicaState.READY,
            in_flight=running + waiting, running=running, waiting=waiting, capacity=self._room,
            kv_used_tokens=engine.kv_used_tokens, kv_total_tokens=engine.kv_total_tokens,
        )  # fmt: skip

    def news(self, seq: int) -> BlockNews | None:
        """Changes of its prefix cache after change `seq`."""
        if not self._reports_blocks:
            return None
        self._catch_up()
        changed = self.engine.news()
        if changed is not None:
            self._journal.apply(*changed)
        return self._journal.since(seq, estimated=False)

    def _catch_up(self) -> None:
        """Advance the engine, so that reports are current."""
        if not self._busy:
            now = self._loop.time()
            self._advance(now)
            self._set(now)

    def _wake(self) -> None:
        self._timer, self._due = None, math.inf
        now = self._loop.time()
        self._advance(now)
        self._set(now)

    def _advance(self, now: float) -> None:
        """Send the results of requests. Gateways may send new ones meanwhile."""
        self._busy = True
        for event in self.engine.advance(now):
            self.version += 1
            port = self._ports.get(event.id)
            if port is None:  # cancelled at this very moment
                continue
            if event.kind is Kind.FIRST:
                port.protocol.data_received(ANSWER_BEGINS)
                continue
            job, port.job = port.job, None
            assert job is not None
            del self._ports[event.id]
            self._done(event)
            port.protocol.data_received(ANSWER_ENDS % (job.prompt_tokens, job.output_tokens, event.cached_tokens))
        self._busy = False

    def _set(self, now: float) -> None:
        due = self.engine.next_at
        if due != self._due:
            if self._timer is not None:
                self._timer.cancel()
            self._due = due
            self._timer = self._loop.call_at(max(due, now), self._wake) if due < math.inf else None
