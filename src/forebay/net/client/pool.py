"""Connection pool for one upstream: reuses idle connections, opens new ones on demand, queues calls meanwhile."""

import asyncio
import errno
import ssl
from collections import deque
from collections.abc import Callable
from typing import Final, cast

from forebay.net.client.call import Call, Sink, because
from forebay.net.client.keepalive import keep_alive
from forebay.net.client.upstream import CachedHead, Upstream
from forebay.net.outbox import UNBATCHED, Outbox

CONNECT_TIMEOUT_S: Final = 2.0
CONNECTING_MAX: Final = 64
"""Connections of a pool being opened at once: a connection takes more memory while it is being opened than
afterwards. Further calls wait."""
IDLE_MAX: Final = 256
IDLE_AGE_S: Final = 50.0
"""Shorter than the idle timeout of our own servers, so that they rarely close a connection that is about to be
reused."""
SWEEP_S: Final = 1.0
NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of connecting whose cause is this process or machine: no file descriptors, memory or ports."""


class Pool:
    """Connections to one upstream, over TLS if `tls` is given; `greeting` is a header line added to the first request
    on each. Connecting runs in tasks of `group` until `close`. Without `outbox`, writes and reads are not batched."""

    def __init__(
        self,
        host: str,
        port: int,
        group: asyncio.TaskGroup,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        idle_max: int = IDLE_MAX,
        idle_age_s: float = IDLE_AGE_S,
        tls: ssl.SSLContext | None = None,
        greeting: bytes = b"",
        outbox: Outbox | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self.outbox = outbox or UNBATCHED
        self._group = group
        self._connect_timeout_s = connect_timeout_s
        self._idle_max = idle_max
        self._idle_age_s = idle_age_s
        self._tls, self._greeting = tls, greeting
        self._idle: deque[Upstream] = deque()
        self._open: dict[Upstream, None] = {}
        self._connecting: dict[asyncio.Task[None], Call] = {}
        self._line: deque[Call] = deque()
        """Calls waiting for a slot to connect, or for a connection that becomes idle first."""
        self._closed = False
        self._sweep_at = 0.0
        self.sends_1xx = False
        """Whether the upstream has ever sent a 1xx response to show that it is working."""
        self.known: dict[bytes, CachedHead] = {}
        """Parsed response heads, by their bytes without the token counts."""
        self.counts_begin = 0
        """Where their line was in the last response head: looking there first saves most searches."""
        self._now: Callable[[], float] = asyncio.get_running_loop().time

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._open)

    def call(self, request: bytes, sink: Sink, *, once: bool = False) -> Call:
        """Send a complete request (not HEAD). The sink is never called before this returns.

        `once`: it fails, rather than being sent again, if a kept connection is lost after it was sent there.
        """
        call = Call(self, request, sink, once=once)
        oldest = self._now() - self._idle_age_s
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since >= oldest and not connection.transport.is_closing():
                call.run_on(connection)
                return call
            connection.transport.abort()
        self.again(call)
        return call

    def again(self, call: Call) -> None:
        """Run a call on a new connection."""
        call.connection = None
        if call.sink is None:
            return
        if self._closed:
            asyncio.get_running_loop().call_soon(call.fail, "connect", "The pool is closed.")
            return
        self._line.append(call)
        self._begin()

    def release(self, connection: Upstream) -> None:
        """Take back a connection whose call has finished: give it to a waiting call or keep it idle."""
        if self._closed:
            connection.transport.abort()
            return
        while self._line:
            call = self._line.popleft()
            if call.sink is not None:
                call.run_on(connection)
                return
        connection.idle_since = now = self._now()
        self._idle.append(connection)
        idle, oldest = self._idle, now - self._idle_age_s
        while idle and (len(idle) > self._idle_max or idle[0].idle_since < oldest):
            idle.popleft().transport.abort()

    def lost(self, connection: Upstream) -> None:
        """Remove a closed connection."""
        self._open.pop(connection, None)
        if connection in self._idle:
            self._idle.remove(connection)

    def sweep(self, now: float) -> None:
        """Fail calls whose response has stalled for too long. Call it often; `now` is the loop's time."""
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_S
            for connection in list(self._open):
                connection.sweep(now)

    def close(self) -> None:
        """Close every connection; calls in flight fail."""
        self._closed = True
        self._idle.clear()
        for task, call in list(self._connecting.items()):
            task.cancel()
            self._fail(call, "The pool is closed.")
        for connection in list(self._open):
            connection.transport.abort()

    def _begin(self, tried: asyncio.Task[None] | None = None) -> None:
        if tried is not None:
            del self._connecting[tried]
        while self._line and len(self._connecting) < CONNECTING_MAX:
            call = self._line.popleft()
            if call.sink is not None:
                task = self._group.create_task(self._connect(call))
                self._connecting[task] = call
                task.add_done_callback(self._begin)

    def _fail(self, call: Call, text: str, ours: bool = False) -> None:
        """Fail a call and all that are queued behind it: they would only fail the same way, later."""
        failed, self._line = [call, *self._line], deque()
        for each in failed:
            each.fail("connect", text, ours)

    async def _connect(self, call: Call) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, made = await loop.create_connection(
                    lambda: cast(asyncio.Protocol, Upstream(self)), self.host, self.port, ssl=self._tls
                )
        except TimeoutError:
            self._fail(call, f"No connection to {self.host}:{self.port} within {self._connect_timeout_s:g} s.")
        except OSError as error:
            self._fail(call, f"No connection to {self.host}:{self.port}{because(error)}.", error.errno in NO_ROOM)
        else:
            connection = cast(Upstream, made)
            self._open[connection] = None
            keep_alive(connection.transport)
            if call.sink is None:
                self.release(connection)
            else:
                if self._greeting:
                    call.request = call.request.replace(b"\r\n", b"\r\n" + self._greeting, 1)
                call.run_on(connection)
