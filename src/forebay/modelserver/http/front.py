"""Routing of the protocol's endpoints to their handlers."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, Final

import structlog

from forebay.core.serving.errors import Refused
from forebay.modelserver.http.administration import Administration
from forebay.modelserver.http.answering import fail, refuse, refuse_method
from forebay.modelserver.http.generating import start_generation
from forebay.modelserver.http.inferring import Inferring
from forebay.modelserver.http.options import FrontOptions
from forebay.modelserver.ports import Models
from forebay.modelserver.process.segments import Staging
from forebay.modelserver.tasks.endpoint import PREFIX, TaskFront
from forebay.modelserver.tasks.table import TASKS
from forebay.net.exchange import Exchange
from forebay.wire import http1
from forebay.wire.oip import documents
from forebay.wire.oip.ports import Regions, Settings
from forebay.wire.oip.route import Endpoint, Route, route

GET: Final = b"GET"
POST: Final = b"POST"

Handler = Callable[[Exchange, Route], None]


class HttpFront:
    """Handles the exchanges of a server. `tasks` owns long operations: loading and unloading models.

    `others` handle targets outside the protocol. `staging`: where large inputs are read to.
    """

    def __init__(
        self,
        models: Models,
        regions: Regions,
        settings: Settings,
        *,
        tasks: asyncio.TaskGroup,
        log: structlog.stdlib.BoundLogger,
        options: FrontOptions,
        staging: Staging | None = None,
        others: Mapping[bytes, Callable[[Exchange], None]] = MappingProxyType({}),
    ) -> None:
        self._models = models
        self._others = dict(others)
        self._tasks = tasks
        self._log = log
        self._metadata = documents.server_metadata(options.name, options.version)
        self._infer = Inferring(
            models,
            regions,
            tasks,
            log,
            json_bytes_max=options.json_bytes_max,
            json_output_bytes_max=options.json_output_bytes_max,
            strings_max=options.strings_max,
            forwarded=options.forwarded_headers,
            staging=staging,
        )
        self.place = self._infer.place
        self._json_bytes_max = options.json_bytes_max
        self._json_output_bytes_max = options.json_output_bytes_max
        self._of_tasks = TaskFront(models, TASKS, log)
        administration = Administration(models, regions, settings, self._later)
        self._handlers: dict[Endpoint, tuple[bytes, Handler]] = {
            Endpoint.INFER: (POST, self._infer.start),
            Endpoint.GENERATE: (POST, self._generate),
            Endpoint.GENERATE_STREAM: (POST, self._generate),
            Endpoint.SERVER: (GET, self._server),
            Endpoint.LIVE: (GET, self._live),
            Endpoint.READY: (GET, self._ready),
            Endpoint.MODEL: (GET, self._model),
            Endpoint.MODEL_READY: (GET, self._model_ready),
            Endpoint.CONFIG: (GET, self._config),
            Endpoint.STATISTICS: (GET, self._statistics),
            Endpoint.INDEX: (POST, administration.index),
            Endpoint.LOAD: (POST, administration.load),
            Endpoint.UNLOAD: (POST, administration.unload),
            Endpoint.TRACE: (b"", administration.trace),
            Endpoint.LOGGING: (b"", administration.logging),
            Endpoint.SYSTEM_MEMORY: (b"", administration.memory),
            Endpoint.CUDA_MEMORY: (b"", administration.memory),
        }
        """By endpoint: the only method that it accepts, or empty if the handler checks that itself."""

    def handle(self, exchange: Exchange) -> None:
        """Handle one exchange, now or later. Unexpected exceptions are left to the connection."""
        exchange.target = http1.origin_form(exchange.target)  # RFC 9112, 3.2.2: servers must accept both
        other = self._others.get(exchange.target)
        if other is not None:
            other(exchange)
            return
        if exchange.target.startswith(PREFIX):
            self._of_tasks.handle(exchange)
            return
        try:
            asked = route(exchange.target)
            method, handler = self._handlers[asked.endpoint]
            if method and exchange.method != method:
                refuse_method(exchange, method)
            else:
                handler(exchange, asked)
        except Refused as refused:
            refuse(exchange, refused)

    # --- server and model information

    def _server(self, exchange: Exchange, _: Route) -> None:
        exchange.respond(200, [http1.JSON], self._metadata)

    def _live(self, exchange: Exchange, _: Route) -> None:
        exchange.respond(200, [http1.JSON], b'{"live":true}')  # KServe's client reads it, Triton's only the status

    def _ready(self, exchange: Exchange, _: Route) -> None:
        ready = self._models.ready
        exchange.respond(200 if ready else 400, [http1.JSON], b'{"ready":true}' if ready else b'{"ready":false}')

    def _model(self, exchange: Exchange, asked: Route) -> None:
        view = self._models.view(asked.model, asked.version)
        versions = [asked.version] if asked.version else view.versions
        exchange.respond(200, [http1.JSON], documents.encode(documents.model_metadata(view.config, versions)))

    def _model_ready(self, exchange: Exchange, asked: Route) -> None:
        view = self._models.view(asked.model, asked.version)  # raises unless the model is served
        exchange.respond(200, [http1.JSON], documents.encode({"name": view.config.name, "ready": True}))

    def _config(self, exchange: Exchange, asked: Route) -> None:
        view = self._models.view(asked.model, asked.version)
        exchange.respond(200, [http1.JSON], documents.encode(view.document))

    def _statistics(self, exchange: Exchange, asked: Route) -> None:
        found = self._models.statistics(asked.model, asked.version)
        exchange.respond(200, [http1.JSON], documents.encode(documents.statistics(found)))

    def _generate(self, exchange: Exchange, asked: Route) -> None:
        start_generation(
            exchange,
            self._models,
            asked,
            self._log,
            streams=asked.endpoint is Endpoint.GENERATE_STREAM,
            tensor_bytes_max=self._json_bytes_max,
            output_bytes_max=self._json_output_bytes_max,
        )

    # --- long operations

    def _later(self, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        """Respond with an empty body once the work is done, or with its error. Runs on if the client disconnects."""
        self._tasks.create_task(self._finish(exchange, work))

    async def _finish(self, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Refused as refused:
            refuse(exchange, refused)
        except Exception as error:  # supervisor: a bug costs one response, not the task group of the server
            fail(exchange, self._log, error)
        else:
            exchange.respond(200, [http1.JSON], b"")
