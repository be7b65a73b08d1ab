"""An HTTP/2 server on `asyncio.Protocol`: listening, connection limit, pings, maximum ages, draining.

With `tls` clients negotiate `h2`; without, they start with it directly (prior knowledge), as gRPC clients do.
"""

import asyncio
import math
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar, cast

from forebay.net.tls import in_flight_bytes
from forebay.wire.http2.headers import Header
from forebay.wire.http2.session import Session
from forebay.wire.http2.streams import Stream, StreamHandler

H = TypeVar("H")
HTTP_2: Final = ("h2",)
"""The ALPN protocols of this server."""
BACKLOG: Final = 4096
CONNECTIONS_MAX: Final = 10_000
SWEEP_S: Final = 1.0
START_TIMEOUT_S: Final = 10.0
"""For the TLS handshake and the client's preface."""
LINGER_S: Final = 1.0
"""When shutting down: how long to wait for a client to confirm that it opens no more streams. At the end of every
connection: how long the client must be silent before it is closed."""
STALL_TIMEOUT_S: Final = 300.0
"""A client that has read nothing of pending data for this long is disconnected."""
WRITE_BUFFER_BYTES: Final = 1024 * 1024
"""With more unsent data than this, reading and writing stop until the client has read some."""
JOINED_BYTES_MAX: Final = 65_536
"""Up to this size, pieces are joined into one write rather than passed as a list."""
PING_IDLE_LEAST_S: Final = 7200.0
"""The least seconds between pings of a client without open calls."""


@dataclass(frozen=True, slots=True)
class Keepalive:
    """Keepalive pings, ping limits and maximum connection age. The defaults are gRPC's."""

    ping_s: float = 7200.0
    """A client that has sent nothing for this long is pinged."""
    ping_timeout_s: float = 20.0
    ping_without_calls: bool = False
    """Ping clients without open calls, and let them ping us as often as the others."""
    ping_least_s: float = 300.0
    """The least seconds between pings of a client while no data is sent to it."""
    strikes_max: int = 2
    """How many pings may come too soon before the connection is closed; 0: any number."""
    age_s: float = math.inf
    """An older connection is closed as soon as its calls have ended."""
    age_grace_s: float = math.inf


class Http2Server(Generic[H]):
    """Calls `begin` for each request; `read` and `begin` are those of `wire.http2.session.Session`."""

    def __init__(
        self,
        read: Callable[[Sequence[Header]], H | None],
        begin: Callable[[Session[H], Stream, H], StreamHandler | None],
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

    def handlers(self) -> list[StreamHandler]:
        """The handlers of all open streams."""
        streams = [stream for link in self._links for stream in link.streams]
        return [stream.handler for stream in streams if stream.handler is not None]

    async def drain(self, grace_s: float) -> bool:
        """Accept no more connections and requests, let those in flight finish. True if all did within `grace_s`."""
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
        """Close the listener and abort the remaining connections."""
        if self._listener is not None:
            self._listener.close()
        if self._timer is not None:
            self._timer.cancel()
        for link in list(self._links):
            link.abort()

    def opened(self, link: "Link[H]") -> bool:
        """Register a connection; False when there are too many, or while draining."""
        if self.draining or len(self._links) >= CONNECTIONS_MAX:
            return False
        self._links[link] = None
        return True

    def closed(self, link: "Link[H]") -> None:
        """Remove a closed connection."""
        self._links.pop(link, None)
        if self._empty is not None and not self._links:
            self._empty.set()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(SWEEP_S, self._sweep)  # first: timeouts must keep running
        self.now = now = loop.time()
        for link in list(self._links):
            try:
                link.sweep(now)
            except Exception as error:  # supervisor: an exception in one connection closes that one only
                loop.call_exception_handler({"message": "sweeping a connection failed", "exception": error})
                link.abort()


class Link(asyncio.Protocol, Generic[H]):
    """One connection: moves bytes between its socket and its session."""

    __slots__ = (
        "_born",
        "_heard",
        "_leaving_at",
        "_loop",
        "_moved",
        "_over_at",
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
        self._over_at: float | None = None
        self._moved = ((0, 0), owner.now)
        """What had been sent and what was buffered, and when that last changed."""
        self._waking = False

    @property
    def streams(self) -> list[Stream]:
        """The open streams."""
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
        self._waking = True  # one flush for all responses to this read
        try:
            self._session.receive(data)
        finally:
            self._flush()

    def pause_writing(self) -> None:
        self._session.paused = True
        if self._over_at is None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()
        self._session.resume()
        self._flush()

    # --- what the session has to send

    def wake(self) -> None:
        """The session may have something to send: flush it before the next loop iteration."""
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
        if session.over and self._over_at is None:
            self._linger()

    def _linger(self) -> None:
        """Half-close, and discard what still arrives: closing over unread bytes, window updates for example, would
        reset the connection, and the client would lose what it has not read yet."""
        transport = self._transport
        self._over_at = self._heard = self._owner.now
        self._moved = (0, 0), self._owner.now
        if not transport.is_closing():
            transport.resume_reading()
            if transport.can_write_eof():  # TLS cannot half-close
                transport.write_eof()

    # --- time

    def leave(self) -> None:
        """Ask the client to send further requests on another connection (GOAWAY)."""
        if self._leaving_at is None:
            self._leaving_at = self._owner.now
            self._session.leave()
            self._flush()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def sweep(self, now: float) -> None:
        """Enforce the timeouts and age limits."""
        session, rules = self._session, self._owner.keepalive
        session.tick()
        if self._over_at is not None:
            self._sweep_over(now, self._over_at)
            return
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

    def _sweep_over(self, now: float, over_at: float) -> None:
        """Close once the client has received everything and is silent; soon, if it has broken the rules."""
        unsent = 0, self._transport.get_write_buffer_size() + in_flight_bytes(self._transport)
        if unsent != self._moved[0]:
            self._moved = unsent, now
        if now - over_at > (LINGER_S if self._leaving_at is None else STALL_TIMEOUT_S):
            self.abort()
        elif not unsent[1] and now - max(self._heard, self._moved[1]) > LINGER_S + SWEEP_S:
            self._transport.close()

    def _stalled(self, now: float) -> bool:
        session = self._session
        unsent = self._transport.get_write_buffer_size()
        at = session.sent, unsent and unsent + in_flight_bytes(self._transport)
        if at != self._moved[0] or not (at[1] or any(each.queue for each in session.streams.values())):
            self._moved = at, now
        return now - self._moved[1] > STALL_TIMEOUT_S

    def _is_silent(self, now: float) -> bool:
        """Ping a silent client if it is due. True if it has not answered the last ping in time."""
        rules, heard = self._owner.keepalive, self._heard
        if self._session.paused:  # nothing is read now: that the client reads shows that it is there
            heard = max(heard, self._moved[1])
        if self._pinged_at is not None:
            return now - max(self._pinged_at, heard) > rules.ping_timeout_s
        if now - heard > rules.ping_s and (rules.ping_without_calls or self._session.streams):
            self._pinged_at = now
            self._session.ping()
        return False

    def _on_ping(self) -> bool:
        """Whether the ping is allowed; False closes the connection."""
        rules, session, now = self._owner.keepalive, self._session, self._owner.now
        if session.data_sent:
            self._ping_came_at, self._strikes = -math.inf, 0
        free = rules.ping_without_calls or bool(session.streams)
        if now - self._ping_came_at < (rules.ping_least_s if free else PING_IDLE_LEAST_S):
            self._strikes += 1
            return not rules.strikes_max or self._strikes <= rules.strikes_max
        self._ping_came_at = now
        return True
