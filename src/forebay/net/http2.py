"""An HTTP/2 server on `asyncio.Protocol`: listening, the limit on connections, pings, ages, draining.

With `tls` clients agree on `h2`; without, they begin with it right away, as gRPC's do.
"""

import asyncio
import math
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar, cast

from forebay.wire.http2.headers import Header
from forebay.wire.http2.session import Session
from forebay.wire.http2.streams import Stream, Taker

H = TypeVar("H")
HTTP_2: Final = ("h2",)
"""What clients of this server agree on in TLS."""
BACKLOG: Final = 4096
CONNECTIONS_MAX: Final = 10_000
SWEEP_S: Final = 1.0
START_TIMEOUT_S: Final = 10.0
"""For TLS and the first words of a client."""
LINGER_S: Final = 1.0
"""A client that does not confirm that it opens no more streams is taken at its silence after so long."""
STALL_TIMEOUT_S: Final = 300.0
"""A client that takes nothing of answers that wait for it, for so long, is gone."""
WRITE_BUFFER_BYTES: Final = 1024 * 1024
"""More than this unsent: nothing is read and nothing more is written until the client has taken some."""
JOINED_BYTES_MAX: Final = 65_536
"""Less than this is copied together rather than handed over in parts."""
PING_IDLE_LEAST_S: Final = 7200.0
"""How often clients without calls may ping."""


@dataclass(frozen=True, slots=True)
class Keepalive:
    """Who looks after a silent connection, and how long it may live. Defaults are gRPC's."""

    ping_s: float = 7200.0
    """A client that has been silent for so long is asked whether it is there."""
    ping_timeout_s: float = 20.0
    ping_without_calls: bool = False
    """Ping clients that have no call open, and let them ping us."""
    ping_least_s: float = 300.0
    """Clients may ping so often while nothing is sent to them."""
    strikes_max: int = 2
    """So many pings too soon are overlooked; 0: all of them."""
    age_s: float = math.inf
    """A connection that is older is given up as soon as its calls have ended."""
    age_grace_s: float = math.inf


class Http2Server(Generic[H]):
    """Calls `begin` for each request; `read` and `begin` are those of `wire.http2.session.Session`."""

    def __init__(
        self,
        read: Callable[[Sequence[Header]], H | None],
        begin: Callable[[Session[H], Stream, H], Taker | None],
        keepalive: Keepalive,
    ) -> None:
        self.keepalive = keepalive
        self.now = 0.0
        self.draining = False
        self._read = read
        self._begin = begin
        self._links: dict[Link[H], None] = {}
        self._listener: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._empty: asyncio.Event | None = None

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        """Listen. Raises OSError if the port is taken."""
        self._sweep()
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: Link(self, Session(self._read, self._begin)),
                host,
                port,
                backlog=BACKLOG,
                ssl=tls,
                ssl_handshake_timeout=START_TIMEOUT_S if tls else None,
            )
        except OSError:
            self.close()
            raise

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._listener is not None, "not started"
        return int(self._listener.sockets[0].getsockname()[1])

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._links)

    def takers(self) -> list[Taker]:
        """Who serves the streams that are open."""
        streams = [stream for link in self._links for stream in link.streams]
        return [stream.taker for stream in streams if stream.taker is not None]

    async def drain(self, grace_s: float) -> bool:
        """Take no more connections and requests, let those under way finish. True if all have within the grace."""
        self.draining = True
        self._empty = asyncio.Event()
        if self._listener is not None:
            self._listener.close()
        for link in list(self._links):
            link.leave()
        try:
            async with asyncio.timeout(grace_s):
                while self._links:
                    self._empty.clear()
                    await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Cut everything that is left."""
        if self._listener is not None:
            self._listener.close()
        if self._timer is not None:
            self._timer.cancel()
        for link in list(self._links):
            link.abort()

    def opened(self, link: "Link[H]") -> bool:
        """Take a connection in; False when there are too many, or no more are wanted."""
        if self.draining or len(self._links) >= CONNECTIONS_MAX:
            return False
        self._links[link] = None
        return True

    def closed(self, link: "Link[H]") -> None:
        """Forget a connection."""
        self._links.pop(link, None)
        if self._empty is not None and not self._links:
            self._empty.set()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(SWEEP_S, self._sweep)  # first of all: timeouts have to go on
        self.now = now = loop.time()
        for link in list(self._links):
            try:
                link.sweep(now)
            except Exception as error:  # supervisor: a mistake with one connection costs that one
                loop.call_exception_handler({"message": "sweeping a connection failed", "exception": error})
                link.abort()


class Link(asyncio.Protocol, Generic[H]):
    """One connection: bytes between its socket and its session."""

    __slots__ = (
        "_born",
        "_heard",
        "_leaving_at",
        "_loop",
        "_moved",
        "_owner",
        "_ping_came_at",
        "_pinged_at",
        "_session",
        "_strikes",
        "_transport",
        "_waking",
    )

    def __init__(self, owner: Http2Server[H], session: Session[H]) -> None:
        self._owner = owner
        self._session = session
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self._born = self._heard = owner.now
        self._pinged_at: float | None = None
        self._ping_came_at, self._strikes = -math.inf, 0
        self._leaving_at: float | None = None
        self._moved = ((0, 0), owner.now)
        """How far sending had come, and when that was found."""
        self._waking = False

    @property
    def streams(self) -> list[Stream]:
        """Those that are open."""
        return list(self._session.streams.values())

    # --- the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        session = self._session
        session.wake, session.on_ping = self.wake, self._on_ping
        if self._owner.opened(self):
            self._flush()
        else:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._session.lost()
        self._owner.closed(self)

    def data_received(self, data: bytes) -> None:
        self._heard, self._pinged_at = self._owner.now, None
        self._waking = True  # one flush for all that is answered at once
        try:
            self._session.receive(data)
        finally:
            self._flush()

    def pause_writing(self) -> None:
        self._session.paused = True
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()
        self._session.resume()
        self._flush()

    # --- what the session has to send

    def wake(self) -> None:
        """There may be something to send: it goes before the loop comes around."""
        if not self._waking:
            self._waking = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._waking = False
        session, transport = self._session, self._transport
        out = session.out
        if out and not transport.is_closing():
            session.out = []
            if len(out) == 1:
                transport.write(out[0])
            elif sum(map(len, out)) <= JOINED_BYTES_MAX:
                transport.write(b"".join(out))
            else:
                transport.writelines(out)
        if session.over:
            transport.close()

    # --- time

    def leave(self) -> None:
        """Ask the client to go elsewhere with its next request."""
        if self._leaving_at is None:
            self._leaving_at = self._owner.now
            self._session.leave()
            self._flush()

    def abort(self) -> None:
        """Cut the connection."""
        self._transport.abort()

    def sweep(self, now: float) -> None:
        """What is due by now."""
        session, rules = self._session, self._owner.keepalive
        session.tick()
        age = now - self._born
        if age > rules.age_s:
            self.leave()
        gone = age > rules.age_s + rules.age_grace_s or (age > START_TIMEOUT_S and not session.started)
        if gone or self._stalled(now) or self._is_silent(now):
            self.abort()
            return
        if self._leaving_at is not None and now - self._leaving_at > LINGER_S:
            session.refuse()
        self._flush()

    def _stalled(self, now: float) -> bool:
        session = self._session
        at = session.sent, self._transport.get_write_buffer_size()
        if at != self._moved[0] or not (at[1] or any(each.queue for each in session.streams.values())):
            self._moved = at, now
        return now - self._moved[1] > STALL_TIMEOUT_S

    def _is_silent(self, now: float) -> bool:
        """Ping a client that says nothing; whether it has not answered that."""
        rules = self._owner.keepalive
        if self._pinged_at is not None:
            return now - self._pinged_at > rules.ping_timeout_s
        if now - self._heard > rules.ping_s and (rules.ping_without_calls or self._session.streams):
            self._pinged_at = now
            self._session.ping()
        return False

    def _on_ping(self) -> bool:
        """Whether the client may ping again already."""
        rules, session, now = self._owner.keepalive, self._session, self._owner.now
        if session.data_sent:
            self._ping_came_at, self._strikes = -math.inf, 0
        free = rules.ping_without_calls or bool(session.streams)
        if now - self._ping_came_at < (rules.ping_least_s if free else PING_IDLE_LEAST_S):
            self._strikes += 1
            return not rules.strikes_max or self._strikes <= rules.strikes_max
        self._ping_came_at = now
        return True
