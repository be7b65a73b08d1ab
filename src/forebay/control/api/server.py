"""The HTTP server of the admin API."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

CONNECTIONS_MAX = 256
"""With more, those that have waited longest for a request are closed: each takes a file descriptor from control."""
IDLE_TIMEOUT_S = 30
STOP_GRACE_S = 2
TICK_S = 1.0
"""How often the date of responses is updated. Uvicorn polls ten times a second whether it should stop; here an event
tells it, so that an idle machine stays idle."""


class AdminConnection(HttpToolsProtocol):
    """A connection. Uvicorn keeps those on which no request ever comes, and any number of them."""

    waits_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Make room for it."""
        self.waits_since = self.loop.time()
        super().connection_made(transport)
        there = [each for each in self.connections if not each.transport.is_closing()]
        idle = [each for each in there if isinstance(each, AdminConnection) and each.waits and each is not self]
        if len(there) >= CONNECTIONS_MAX and idle:
            min(idle, key=lambda each: each.waits_since).transport.abort()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.waits_since = self.loop.time()
        super().on_response_complete()

    @property
    def waits(self) -> bool:
        """Whether no request is in progress."""
        return self.cycle is None or self.cycle.response_complete


class AdminServer(uvicorn.Server):
    """Serves the admin API on bound sockets. Signals are handled by its owner."""

    def __init__(self, app: Starlette) -> None:
        config = uvicorn.Config(
            app,
            http=AdminConnection,
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_keep_alive=IDLE_TIMEOUT_S,
            timeout_graceful_shutdown=STOP_GRACE_S,
        )
        super().__init__(config)
        self._stopped = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield

    async def main_loop(self) -> None:
        """Replaces uvicorn's polling loop."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._stopped.wait()

    async def run_on(self, listener: socket.socket) -> None:
        """Serve until `stop`."""
        await self.serve([listener])

    def stop(self) -> None:
        """Make `run_on` return soon."""
        self.should_exit = True
        self._stopped.set()
