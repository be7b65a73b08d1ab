"""The admin API: is control alive, is the cluster ready, how is it, what has happened."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import asdict

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from forebay.control.journal import Journal
from forebay.control.loop import Controller
from forebay.control.status import Status, make_status
from forebay.core.errors import Code, Refusal
from forebay.obs.clock import wall_s
from forebay.obs.metrics import CONTENT_TYPE, Metrics
from forebay.wire.errors import error_body

CONNECTIONS_MAX = 256
IDLE_TIMEOUT_S = 30
STOP_GRACE_S = 2


def make_app(control: Controller, journal: Journal, metrics: Metrics) -> Starlette:
    """The application; it only reads."""

    def status() -> Status:
        return make_status(control, asyncio.get_running_loop().time(), wall_s())

    async def livez(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        now = status()
        lacking = [f"{m.name}: no replica is ready" for m in now.models if not m.ready]
        if not now.ready:
            return PlainTextResponse("\n".join([*(lacking or [f"gateway: {now.phase}"]), ""]), status_code=503)
        return PlainTextResponse("ok\n")

    async def show_metrics(request: Request) -> Response:
        return Response(metrics.render(), headers={"content-type": CONTENT_TYPE.decode()})

    async def show_status(request: Request) -> Response:
        await control.look()
        return _json(asdict(status()))

    async def show_events(request: Request) -> Response:
        after = request.query_params.get("after", "0")
        if not after.isascii() or not after.isdigit() or len(after) > 18:
            return _refuse(400, Code.INVALID_REQUEST, "after: expected the number of an event")
        return _json({"events": [asdict(event) for event in journal.since(int(after))]})

    async def refuse(request: Request, error: Exception) -> Response:
        wrong_method = isinstance(error, HTTPException) and error.status_code == 405
        return _refuse(405, Code.METHOD_NOT_ALLOWED) if wrong_method else _refuse(404, Code.NOT_FOUND)

    routes = {
        "/livez": livez,
        "/readyz": readyz,
        "/metrics": show_metrics,
        "/v1/status": show_status,
        "/v1/events": show_events,
    }
    return Starlette(
        routes=[Route(path, endpoint, methods=["GET"]) for path, endpoint in routes.items()],
        exception_handlers={404: refuse, 405: refuse},
    )


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _refuse(status: int, code: Code, text: str = "") -> Response:
    return Response(error_body(Refusal(code, text)), status_code=status, media_type="application/json")


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
