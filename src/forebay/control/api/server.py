"""The HTTP server of the admin API."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

CONNECTIONS_MAX = 256
IDLE_TIMEOUT_S = 30
STOP_GRACE_S = 2
TICK_S = 1.0
"""How often the date of responses is updated. Uvicorn polls ten times a second whether it should stop; here an event
tells it, so that an idle machine stays idle."""


class AdminServer(uvicorn.Server):
    """Serves the admin API on bound sockets. Signals are handled by its owner."""

    def __init__(self, app: Starlette) -> None:
        config = uvicorn.Config(
            app,
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
