"""An HTTP/1.1 server on `asyncio.Protocol`: listening, the limit on connections, timeouts, draining."""

import asyncio
import heapq
import math
import socket
import ssl
from collections.abc import Callable
from email.utils import formatdate
from functools import partial
from typing import Final, cast

from forebay.core.errors import Code
from forebay.core.model import Limits
from forebay.net.connection import Connection
from forebay.net.exchange import Exchange
from forebay.net.outbox import NOBODYS, Outbox
from forebay.net.owner import Common
from forebay.obs.clock import wall_s

__all__ = ["Exchange", "Handler", "HttpServer"]

Handler = Callable[[Exchange], None]
BACKLOG: Final = 4096
SWEEP_S_MAX: Final = 1.0
ROOM_SHARE: Final = 64
"""When all places are taken, one in so many is made free at once: looking for them costs as much as for one."""
ACCEPT_MORE: Final = 32
"""How many more are taken in when the loop has let one in: alone, it would make each of a crowd wait for a round."""
ACCEPT_AGAIN_S: Final = 1.0
"""How long nothing is accepted once that has failed, as it does without file descriptors."""


class HttpServer:
    """Calls `handler` once per request; `refused` hears the code of what never became one.

    `wants_body` is asked about requests whose head is there before their body: where it says no, the handler gets
    the request without a body, and the connection closes after the answer. Requests with the header `alive_for` are
    told now and then that their answer is still to come. Answers leave with what else is in the `outbox`.
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
    ) -> None:
        self.common = Common(limits, alive_for, outbox)
        self.handle = handler
        self.refused = refused
        self.named: Callable[[Exchange, Code], bytes] = lambda *_: b""
        """Gives the answer to what never became a request an id: see `Owner`."""
        self.wants_body = wants_body
        self._connections: dict[Connection, None] = {}
        self._arriving: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self._doors: list[socket.socket] = []
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
        """Listen, with `tls` for HTTPS. Raises OSError if the port is taken.

        `unsent_bytes_max`: what the kernel may hold of an answer that it could not send yet; 0: megabytes.
        """
        if self.common.outbox is NOBODYS:
            self.common.outbox = Outbox(asyncio.get_running_loop())
        self._sweep()
        self._tls = tls
        self._over = False  # whoever looks for a free port tries again
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
                if unsent_bytes_max:  # what is accepted inherits it
                    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent_bytes_max)
                door = listening.dup()
                self._doors.append(door)
                if tls is not None:  # the loop would tell of a connection after its handshake only
                    door.listen(BACKLOG)
                    self._watch(door)
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
        """How many connections are open, or about to be."""
        return len(self._connections) + len(self._arriving)

    def stop_accepting(self) -> None:
        """Close the listening sockets; open connections go on, and so do those that the kernel has let in."""
        if self._listener is not None:
            self._listener.close()
        for door in self._doors:
            self._accept(door, BACKLOG)
        self._close_doors()

    async def drain(self, grace_s: float, linger_s: float = 0.0) -> bool:
        """Stop accepting, close idle connections, let the others finish. True if all have within the grace.

        Connections that clients may take for open are closed after `linger_s` only: who asks again just now gets an
        answer, which says that the connection closes.
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
        """Cut everything that is left."""
        self._over = True
        if self._listener is not None:
            self._listener.close()
        self._close_doors()
        if self._timer is not None:
            self._timer.cancel()
        if self._tls is not None:  # handshakes may take long; who else arrives is cut off on arrival
            for task in list(self._arriving):
                task.cancel()
        for connection in list(self._connections):
            connection.abort()

    def opened(self, connection: Connection) -> bool:
        """Take a connection in; False when there are too many (it is kept until it has read its refusal)."""
        self._connections[connection] = None
        if self._over:
            connection.abort()
            return True
        return len(self._connections) <= self.common.limits.connections_max or self._make_room()

    def closed(self, connection: Connection) -> None:
        """Forget a connection."""
        self._connections.pop(connection, None)
        self._left()

    def _left(self) -> None:
        if self._empty is not None and not self.connections:
            self._empty.set()

    def _make_room(self) -> bool:
        """Cut off who has sent no whole head for longest, and not just come. False if everybody is busy."""
        now = self.common.now
        if self._no_room_at == now:  # not for every one of many who come in vain
            return False
        idle = [each for each in self._connections if each.idle_since < now]
        if not idle:
            self._no_room_at = now
            return False
        for each in heapq.nsmallest(1 + len(idle) // ROOM_SHARE, idle, key=lambda x: x.idle_since):
            del self._connections[each]
            each.abort()
        return True

    # --- accepting without the loop's help: of TLS, of crowds, and of the last ones

    def _let_in(self) -> asyncio.Protocol:
        asyncio.get_running_loop().call_soon(self._accept_more)  # libuv accepts one per round
        return cast(asyncio.Protocol, Connection(self))

    def _accept_more(self) -> None:
        for door in self._doors:
            self._accept(door, ACCEPT_MORE)

    def _watch(self, door: socket.socket) -> None:
        if door.fileno() >= 0:
            asyncio.get_running_loop().add_reader(door, self._accept, door, BACKLOG)

    def _accept(self, door: socket.socket, most: int) -> None:
        """Take in who waits at a listening socket."""
        loop = asyncio.get_running_loop()
        for _ in range(most):
            try:
                sock, _ = door.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                loop.call_exception_handler({"message": "accepting connections failed", "exception": error})
                if self._tls is not None:
                    loop.remove_reader(door)
                    loop.call_later(ACCEPT_AGAIN_S, self._watch, door)
                return
            if (
                self._tls is not None
                and self.connections >= self.common.limits.connections_max
                and not self._make_room()
            ):
                sock.close()  # saying why would take a handshake
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
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: cast(asyncio.Protocol, Connection(self)),
                sock,
                ssl=tls,
                ssl_handshake_timeout=limits.head_timeout_s if tls else None,
                ssl_shutdown_timeout=limits.write_timeout_s if tls else None,
            )
        except OSError:  # no handshake, or none in time
            sock.close()

    def _close_doors(self) -> None:
        for door in self._doors:
            if self._tls is not None:
                asyncio.get_running_loop().remove_reader(door)
            door.close()
        self._doors.clear()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._sweep_s, self._sweep)  # first of all: timeouts have to go on
        self.common.now = now = loop.time()
        self.common.date = b"date: %b\r\n" % formatdate(wall_s(), usegmt=True).encode()
        for connection in list(self._connections):
            try:
                connection.sweep(now)
            except Exception as error:  # supervisor: a mistake with one connection costs that one
                loop.call_exception_handler({"message": "sweeping a connection failed", "exception": error})
                connection.abort()
