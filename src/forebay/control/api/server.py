"""The listener of the admin API."""

import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

CONNECTIONS_MAX = 256
IDLE_TIMEOUT_S = 30
STOP_GRACE_S = 2


class AdminServer(uvicorn.Server):
    """Serves the admin API on sockets that are bound already. Signals are its owner's business."""

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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield

    async def run_on(self, listener: socket.socket) -> None:
        """Serve until `stop`."""
        await self.serve([listener])

    def stop(self) -> None:
        """Make `run_on` return soon."""
        self.should_exit = True
