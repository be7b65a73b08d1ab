"""The admin API: how is the cluster, what has happened, read the cluster file again; and its own description."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from forebay import __version__
from forebay.control.changes import Reloaded
from forebay.control.journal import Happened, Journal
from forebay.control.loop import Controller
from forebay.control.status import Status, make_status
from forebay.core.errors import Code, Refusal
from forebay.obs.clock import wall_s
from forebay.obs.metrics import CONTENT_TYPE, Metrics
from forebay.wire.errors import error_body
from forebay.wire.openapi import admin, document

CONNECTIONS_MAX = 256
IDLE_TIMEOUT_S = 30
STOP_GRACE_S = 2


@dataclass(frozen=True, slots=True)
class Events:
    """What `/v1/events` answers."""

    events: tuple[Happened, ...]


def make_app(
    control: Controller, journal: Journal, metrics: Metrics, reload: Callable[[], Awaitable[Reloaded]]
) -> Starlette:
    """The application. It only reads, but for `reload`, which takes a changed cluster file over."""
    description = admin.document(__version__, Status, Events, Reloaded)

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
        return _json(Events(tuple(journal.since(int(after)))))

    async def take_file_over(request: Request) -> Response:
        if "origin" in request.headers:  # browsers send it along; any web page could ask for this
            return _refuse(400, Code.INVALID_REQUEST, "A web page may not ask for this.", param="origin")
        done = await reload()
        return _json(done, 422 if done.problems else 200)

    async def describe(request: Request) -> Response:
        return Response(description, media_type="application/json")

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 405:
            return _refuse(405, Code.METHOD_NOT_ALLOWED, headers=error.headers)
        return _refuse(404, Code.NOT_FOUND)

    routes = {
        "/livez": livez,
        "/readyz": readyz,
        "/metrics": show_metrics,
        "/v1/status": show_status,
        "/v1/events": show_events,
        document.PATH: describe,
    }
    return Starlette(
        routes=[
            *(Route(path, endpoint, methods=["GET"]) for path, endpoint in routes.items()),
            Route("/v1/reload", take_file_over, methods=["POST"]),
        ],
        exception_handlers={404: refuse, 405: refuse},
    )


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _refuse(
    status: int, code: Code, text: str = "", headers: Mapping[str, str] | None = None, param: str | None = None
) -> Response:
    return Response(error_body(Refusal(code, text, param)), status, headers, "application/json")


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
