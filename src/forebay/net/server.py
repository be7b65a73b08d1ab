"""An HTTP/1.1 server on `asyncio.Protocol`: listening, the limit on connections, timeouts, draining."""

import asyncio
import ssl
from collections.abc import Callable
from email.utils import formatdate
from typing import Final

from forebay.core.errors import Code
from forebay.core.model import Limits
from forebay.net.connection import Connection
from forebay.net.exchange import Exchange
from forebay.obs.clock import wall_s

__all__ = ["Exchange", "Handler", "HttpServer"]

Handler = Callable[[Exchange], None]
BACKLOG: Final = 4096
SWEEP_S_MAX: Final = 1.0


class HttpServer:
    """Calls `handler` once per complete request; `refused` hears the code of what never became one."""

    def __init__(self, handler: Handler, limits: Limits, *, refused: Callable[[Code], None] = lambda _: None) -> None:
        self.limits = limits
        self.now = 0.0
        self.date = b""
        self.draining = False
        self.idle_timeout_s = limits.idle_timeout_s
        self.handle = handler
        self.refused = refused
        self._connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._empty: asyncio.Event | None = None
        shortest = min(limits.head_timeout_s, limits.body_timeout_s, limits.idle_timeout_s, limits.write_timeout_s)
        self._sweep_s = min(SWEEP_S_MAX, shortest / 4)

    async def start(
        self, host: str, port: int, *, reuse_port: bool = False, tls: ssl.SSLContext | None = None
    ) -> None:
        """Listen, with `tls` for HTTPS. Raises OSError if the port is taken."""
        loop = asyncio.get_running_loop()
        self._sweep()
        try:
            self._listener = await loop.create_server(
                lambda: Connection(self),
                host,
                port,
                reuse_port=reuse_port,
                backlog=BACKLOG,
                ssl=tls,
                ssl_handshake_timeout=self.limits.head_timeout_s if tls else None,
                ssl_shutdown_timeout=self.limits.write_timeout_s if tls else None,
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
        return len(self._connections)

    def stop_accepting(self) -> None:
        """Close the listening socket; open connections go on."""
        if self._listener is not None:
            self._listener.close()

    async def drain(self, grace_s: float, linger_s: float = 0.0) -> bool:
        """Stop accepting, close idle connections, let the others finish. True if all have within the grace.

        Connections that clients may take for open are closed after `linger_s` only: who asks again just now gets an
        answer, which says that the connection closes.
        """
        self.stop_accepting()
        self.draining = True
        self.idle_timeout_s = linger_s
        self._empty = asyncio.Event()
        for connection in list(self._connections):
            connection.quit()
        try:
            async with asyncio.timeout(grace_s):
                while self._connections:
                    self._empty.clear()
                    await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Cut everything that is left."""
        self.stop_accepting()
        if self._timer is not None:
            self._timer.cancel()
        for connection in list(self._connections):
            connection.abort()

    def opened(self, connection: Connection) -> bool:
        """Take a connection in; False when there are too many (it is kept until it has read its refusal)."""
        self._connections.add(connection)
        return len(self._connections) <= self.limits.connections_max

    def closed(self, connection: Connection) -> None:
        """Forget a connection."""
        self._connections.discard(connection)
        if self._empty is not None and not self._connections:
            self._empty.set()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self.now = now = loop.time()
        self.date = b"date: %b\r\n" % formatdate(wall_s(), usegmt=True).encode()
        for connection in list(self._connections):
            connection.sweep(now)
        self._timer = loop.call_later(self._sweep_s, self._sweep)
