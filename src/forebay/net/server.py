"""An HTTP/1.1 server on `asyncio.Protocol`: listening, connection limit, timeouts, draining."""

import asyncio
import heapq
import math
import socket
import ssl
from collections.abc import Callable
from email.utils import formatdate
from functools import partial
from typing import Final, cast

from forebay.core.errors import Code, Refusal
from forebay.core.model import Limits
from forebay.net.connection import Connection
from forebay.net.exchange import Exchange
from forebay.net.outbox import UNBATCHED, Outbox
from forebay.net.owner import Common, Place
from forebay.net.reading.refusing import LINE_BYTES, target_in
from forebay.obs.clock import wall_s

__all__ = ["Exchange", "Handler", "HttpServer"]

Handler = Callable[[Exchange], None]
BACKLOG: Final = 4096
SWEEP_S_MAX: Final = 1.0
EVICTION_SHARE: Final = 64
"""At the connection limit, one in this many idle connections is evicted at once: finding them costs as much as
finding one."""
ACCEPT_MORE: Final = 32
"""How many more connections to accept after the loop has accepted one: it alone accepts one per iteration."""
ACCEPT_AGAIN_S: Final = 1.0
"""How long to stop accepting after accept failed, for lack of file descriptors for example."""
NOT_HTTPS: Final = "This port serves HTTPS: use https:// instead of http:// in the URL."


class HttpServer:
    """Calls `handler` once per request; `refused` gets the error code of what never became a request.

    `wants_body` is called for requests whose head arrives before their body: if it returns False, the handler gets
    the request without a body, and the connection closes after the response. Requests with the header `alive_for` get
    a 102 now and then while they wait. Responses are batched with the other writes of `outbox`. Large bodies are read
    into the memory that `place` gives for them, without further copies.
    """

    def __init__(
        self,
        handler: Handler,
        limits: Limits,
        *,
        refused: Callable[[Code], None] = lambda _: None,
        wants_body: Callable[[Exchange], bool] = lambda _: True,
        alive_for: bytes = b"",
        outbox: Outbox | None = None,
        place: Place | None = None,
    ) -> None:
        self.common = Common(limits, alive_for, outbox, place)
        self.handle = handler
        self.refused = refused
        self.refusal_id: Callable[[Exchange, Code], bytes] = lambda *_: b""
        """Assigns a request id to the response to what never became a request: see `Owner`."""
        self.wants_body = wants_body
        self._connections: dict[Connection, None] = {}
        self._arriving: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self._listen_socks: list[socket.socket] = []
        self._tls: ssl.SSLContext | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._empty: asyncio.Event | None = None
        self._no_room_at = -math.inf
        self._over = False
        shortest = min(limits.head_timeout_s, limits.body_timeout_s, limits.idle_timeout_s, limits.write_timeout_s)
        self._sweep_s = min(SWEEP_S_MAX, shortest / 4)

    async def start(
        self,
        host: str,
        port: int,
        *,
        reuse_port: bool = False,
        tls: ssl.SSLContext | None = None,
        unsent_bytes_max: int = 0,
    ) -> None:
        """Listen, over TLS if `tls` is given. Raises OSError if the port is taken.

        `unsent_bytes_max`: how much of a response the kernel may buffer before sending it (TCP_NOTSENT_LOWAT); 0: its
        default, megabytes.
        """
        if self.common.outbox is UNBATCHED:
            self.common.outbox = Outbox(asyncio.get_running_loop())
        self._sweep()
        self._tls = tls
        self._over = False  # a caller looking for a free port calls this again
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                self._let_in,
                host,
                port,
                reuse_port=reuse_port,
                backlog=BACKLOG,
                start_serving=tls is None,
            )
            for listening in self._listener.sockets:
                if unsent_bytes_max:  # accepted sockets inherit it
                    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent_bytes_max)
                listen_sock = listening.dup()
                self._listen_socks.append(listen_sock)
                if tls is not None:  # the loop would report a connection only after its handshake
                    listen_sock.listen(BACKLOG)
                    self._watch(listen_sock)
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
        """How many connections are open or being accepted."""
        return len(self._connections) + len(self._arriving)

    def stop_accepting(self) -> None:
        """Close the listening sockets after accepting what the kernel has queued; open connections go on."""
        if self._listener is not None:
            self._listener.close()
        for listen_sock in self._listen_socks:
            self._accept(listen_sock, BACKLOG)
        self._close_listen_socks()

    async def drain(self, grace_s: float, linger_s: float = 0.0) -> bool:
        """Stop accepting, close idle connections, let the others finish. True if all did within `grace_s`.

        Idle keep-alive connections are closed only after `linger_s`: a client that sends another request just now
        still gets a response, which announces that the connection closes.
        """
        self.common.draining = True
        self.common.idle_timeout_s = linger_s
        self._empty = asyncio.Event()
        self.stop_accepting()
        for connection in list(self._connections):
            connection.quit()
        try:
            async with asyncio.timeout(grace_s):
                while self.connections:
                    self._empty.clear()
                    await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Close the listener and abort the remaining connections."""
        self._over = True
        if self._listener is not None:
            self._listener.close()
        self._close_listen_socks()
        if self._timer is not None:
            self._timer.cancel()
        if self._tls is not None:  # handshakes may take long; others are aborted once accepted
            for task in list(self._arriving):
                task.cancel()
        for connection in list(self._connections):
            connection.abort()

    def opened(self, connection: Connection) -> bool:
        """Register a connection; False when there are too many (it is kept until the client has read the error)."""
        self._connections[connection] = None
        if self._over:
            connection.abort()
            return True
        return len(self._connections) <= self.common.limits.connections_max or self._evict_idle()

    def closed(self, connection: Connection) -> None:
        """Remove a connection."""
        self._connections.pop(connection, None)
        self._left()

    def _left(self) -> None:
        if self._empty is not None and not self.connections:
            self._empty.set()

    def _evict_idle(self) -> bool:
        """Evict the connections that have waited longest for a complete head, except new ones. False if all are
        busy."""
        now = self.common.now
        if self._no_room_at == now:  # not again for every connection over the limit
            return False
        idle = [each for each in self._connections if each.idle_since < now]
        if not idle:
            self._no_room_at = now
            return False
        for each in heapq.nsmallest(1 + len(idle) // EVICTION_SHARE, idle, key=lambda x: x.idle_since):
            del self._connections[each]
            each.abort()
        return True

    # --- accepting without the loop: for TLS, for bursts, and when closing

    def _let_in(self) -> asyncio.Protocol:
        asyncio.get_running_loop().call_soon(self._accept_more)  # libuv accepts one per iteration
        return cast(asyncio.Protocol, Connection(self))

    def _accept_more(self) -> None:
        for listen_sock in self._listen_socks:
            self._accept(listen_sock, ACCEPT_MORE)

    def _watch(self, listen_sock: socket.socket) -> None:
        if listen_sock.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listen_sock, self._accept, listen_sock, BACKLOG)

    def _accept(self, listen_sock: socket.socket, most: int) -> None:
        """Accept the connections queued on a listening socket."""
        loop = asyncio.get_running_loop()
        for _ in range(most):
            try:
                sock, _ = listen_sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                loop.call_exception_handler({"message": "accepting connections failed", "exception": error})
                if self._tls is not None:
                    loop.remove_reader(listen_sock)
                    loop.call_later(ACCEPT_AGAIN_S, self._watch, listen_sock)
                return
            if (
                self._tls is not None
                and self.connections >= self.common.limits.connections_max
                and not self._evict_idle()
            ):
                sock.close()  # an error response would need a handshake first
                self.refused(Code.CONNECTION_LIMIT)
                continue
            task = loop.create_task(self._take_in(sock))
            self._arriving.add(task)
            task.add_done_callback(partial(self._arrived, sock))

    def _arrived(self, sock: socket.socket, task: "asyncio.Task[None]") -> None:
        if task.cancelled():
            sock.close()
        self._arriving.discard(task)
        self._left()

    async def _take_in(self, sock: socket.socket) -> None:
        limits, tls = self.common.limits, self._tls
        first = await self._peek(sock) if tls is not None else b""
        if tls is not None and not first:
            sock.close()
            return
        connection = Connection(self)
        if b"A" <= first[:1] <= b"Z":  # a handshake begins with 0x16
            connection.turn_away(Refusal(Code.BAD_HTTP, NOT_HTTPS), target_in(first))
            tls = None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: cast(asyncio.Protocol, connection),
                sock,
                ssl=tls,
                ssl_handshake_timeout=limits.head_timeout_s if tls else None,
                ssl_shutdown_timeout=limits.write_timeout_s if tls else None,
            )
        except OSError:  # the handshake failed or timed out
            sock.close()

    async def _peek(self, sock: socket.socket) -> bytes:
        """The first bytes that a client sends, which are not taken; empty: none came in time."""
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(sock, came.set)
        try:
            async with asyncio.timeout(self.common.limits.head_timeout_s):
                await came.wait()
            return sock.recv(LINE_BYTES, socket.MSG_PEEK)
        except OSError:  # TimeoutError is one
            return b""
        finally:
            loop.remove_reader(sock)

    def _close_listen_socks(self) -> None:
        for listen_sock in self._listen_socks:
            if self._tls is not None:
                asyncio.get_running_loop().remove_reader(listen_sock)
            listen_sock.close()
        self._listen_socks.clear()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._sweep_s, self._sweep)  # first: timeouts must keep running
        self.common.now = now = loop.time()
        self.common.date = b"date: %b\r\n" % formatdate(wall_s(), usegmt=True).encode()
        for connection in list(self._connections):
            try:
                connection.sweep(now)
            except Exception as error:  # supervisor: an exception in one connection closes that one only
                loop.call_exception_handler({"message": "sweeping a connection failed", "exception": error})
                connection.abort()
