"""The model server from start to end: listen, load, announce, serve, drain when stopped, unload, exit."""

import asyncio
import errno
import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

import structlog

from forebay import __version__
from forebay.core.model import Limits
from forebay.core.serving.config import ModelConfig
from forebay.core.serving.errors import Refused
from forebay.modelserver.http.answering import refuse_method
from forebay.modelserver.http.front import HttpFront
from forebay.modelserver.http.options import BODY_BYTES_MAX, FrontOptions
from forebay.modelserver.models.options import Options
from forebay.modelserver.ports import IndexEntry
from forebay.modelserver.process.segments import Staging
from forebay.modelserver.regions import SharedRegions
from forebay.modelserver.rpc.front import RpcFront, RpcOptions
from forebay.modelserver.server import ModelServer
from forebay.modelserver.telemetry.gpus import Gpus
from forebay.modelserver.telemetry.latencies import QUANTILES, Latencies
from forebay.modelserver.telemetry.logs import LogSettings
from forebay.modelserver.telemetry.metrics import ServerMetrics
from forebay.modelserver.telemetry.settings import ServerSettings
from forebay.modelserver.telemetry.trace_files import TraceFiles
from forebay.modelserver.telemetry.tracing import TraceSettings, Tracing
from forebay.modelserver.telemetry.watch import ObservedModels
from forebay.net.exchange import Exchange
from forebay.net.server import HttpServer
from forebay.net.tls import BadPair
from forebay.obs.clock import wall_s
from forebay.obs.metrics import CONTENT_TYPE
from forebay.providers.devices.nvml import NvmlSource
from forebay.wire import http1
from forebay.wire.openapi import document, modelserver

IDLE_TIMEOUT_S: Final = 600.0
"""Clients pool connections, and treat a connection that was closed meanwhile as a failure."""
BODY_TIMEOUT_S: Final = 300.0
LINGER_S: Final = 1.0
"""How long open connections still get a response that tells them to close."""
CLOSE_GRACE_S: Final = 1.0
LOOK_EVERY_S: Final = 1.0
DOCUMENT: Final = document.PATH.encode()
METRICS: Final = b"/metrics"


class NotStarted(Exception):  # noqa: N818 - states the condition
    """The server cannot run; the text says why."""


@dataclass(frozen=True, slots=True)
class ListenAddresses:
    """Listening addresses; None: disabled. Port 0 picks a free one."""

    host: str = "127.0.0.1"
    http_port: int | None = 8000
    grpc_port: int | None = 8001
    metrics_port: int | None = 8002
    grpc_host: str = "127.0.0.1"
    metrics_host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class LatencyMetrics:
    """Latency metrics to show; Triton's `--metrics-config`."""

    counters: bool = True
    summaries: bool = False
    histograms: bool = False
    quantiles: tuple[float, ...] = QUANTILES
    """Quantiles of summaries."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All settings of a model server."""

    models: Options
    listen: ListenAddresses = field(default_factory=ListenAddresses)
    body_bytes_max: int = BODY_BYTES_MAX
    bodies_bytes_max: int = Limits().bodies_bytes_max
    """Total size of large HTTP bodies being read at the same time."""
    front: FrontOptions = field(default_factory=FrontOptions)
    rpc: RpcOptions = field(default_factory=RpcOptions)
    exit_on_error: bool = True
    """Exit unless every model to serve at startup could be loaded."""
    drain_s: float = 30.0
    tracing: Tracing = field(default_factory=Tracing)
    latencies: LatencyMetrics = field(default_factory=LatencyMetrics)
    gpus_every_s: float = 2.0
    """Interval of GPU readings for metrics; 0: none."""


@dataclass(frozen=True, slots=True)
class Ready:
    """State after startup. Addresses are `host:port`, or empty."""

    http: str
    grpc: str
    metrics: str
    seconds: float
    """Duration of the startup."""
    index: Sequence[IndexEntry]
    configs: Sequence[ModelConfig]
    """Configurations of the models that are ready."""


@dataclass(frozen=True, slots=True)
class Watcher:
    """Callbacks for progress of the startup."""

    loading: Callable[[Sequence[IndexEntry]], None]
    ready: Callable[[Ready], None]


async def serve(
    plan: Plan, logs: LogSettings, log: structlog.stdlib.BoundLogger, stop: asyncio.Event, watcher: Watcher
) -> None:
    """Run until `stop` is set, then drain. Raises `NotStarted`."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # a model takes five descriptors; the usual limit of 1,024 would allow 200 models
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    failure: NotStarted | None = None
    async with asyncio.TaskGroup() as tasks:
        parts = _Parts(plan, logs, log, tasks)
        try:
            await parts.run(stop, watcher)
        except NotStarted as error:
            failure = error
        finally:
            await parts.close()
    if failure is not None:
        raise failure


class _Parts:
    """Wires the parts of a server."""

    def __init__(
        self, plan: Plan, logs: LogSettings, log: structlog.stdlib.BoundLogger, tasks: asyncio.TaskGroup
    ) -> None:
        self._plan = plan
        self._tasks = tasks
        self._server = ModelServer(plan.models, log)
        self._files = TraceFiles(log)
        self._traces = TraceSettings(plan.tracing, self._files.retire)
        shown = plan.latencies
        latencies = Latencies(summaries=shown.summaries, first_responses=shown.histograms)
        self._server.measured = latencies.observe
        self._models = ObservedModels(
            self._server, traces=self._traces, files=self._files, logs=logs, log=log, latencies=latencies
        )
        self._show = ServerMetrics(
            self._models,
            latencies,
            counters=shown.counters,
            summaries=shown.summaries,
            quantiles=shown.quantiles,
        )
        staging = Staging()
        regions = SharedRegions(staging=staging)
        settings = ServerSettings(self._models, self._traces, logs)
        others = {METRICS: self._handle_metrics, DOCUMENT: _describe}
        front = HttpFront(
            self._models,
            regions,
            settings,
            tasks=tasks,
            log=log,
            options=plan.front,
            staging=staging,
            others=others,
        )
        limits = Limits(
            body_bytes_max=plan.body_bytes_max,
            bodies_bytes_max=plan.bodies_bytes_max,
            idle_timeout_s=IDLE_TIMEOUT_S,
            body_timeout_s=BODY_TIMEOUT_S,
        )
        self._http = HttpServer(front.handle, limits, place=front.place)
        self._metrics = HttpServer(self._handle_metrics, Limits())
        self._rpc = RpcFront(self._models, regions, settings, tasks=tasks, log=log, options=plan.rpc)
        if plan.gpus_every_s and plan.models.gpus:
            self._show.gpus = Gpus(NvmlSource(wall_s), plan.gpus_every_s, log)
        self._looking: asyncio.Task[None] | None = None
        self._running: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None

    async def run(self, stop: asyncio.Event, watcher: Watcher) -> None:
        """Run from listening to the end of draining. Raises `NotStarted`."""
        began = monotonic()
        plan = self._plan
        http, grpc, metrics = await self._listen(plan.listen)
        self._writing = self._tasks.create_task(self._files.run(self._traces))
        self._running = self._tasks.create_task(self._server.run())
        if self._show.gpus is not None:
            self._looking = self._tasks.create_task(self._show.gpus.run())
        problems = await self._started(stop, watcher)
        if problems and plan.exit_on_error:
            raise NotStarted("\n".join(problems))
        if not stop.is_set():
            index = self._server.index(False)
            names = sorted({each.name for each in index if each.state == "READY"})
            configs = [self._server.view(name, "").config for name in names]
            watcher.ready(Ready(http, grpc, metrics, monotonic() - began, index, configs))
            await stop.wait()
        self._models.draining = True
        self._server.abort_loads()  # a load may take much longer than requests are given
        await asyncio.gather(self._http.drain(plan.drain_s, LINGER_S), self._rpc.stop(plan.drain_s))

    async def close(self) -> None:
        """Stop everything that was started."""
        self._models.draining = True
        self._server.stop(drained=True)
        await self._rpc.stop(0)
        if self._looking is not None:
            self._looking.cancel()
        if self._running is not None:
            await self._running
        for server in (self._http, self._metrics):
            await server.drain(CLOSE_GRACE_S)  # requests that have failed now get their response
            server.close()
        if self._writing is not None:
            self._writing.cancel()
            await self._files.flush(self._traces, last=True)

    async def _listen(self, listen: ListenAddresses) -> tuple[str, str, str]:
        """Listen on all ports, or fail; returns the addresses."""
        http = grpc = metrics = ""
        if listen.http_port is not None:
            http = await _listen(self._http, listen.host, listen.http_port, "HTTP")
        if listen.metrics_port is not None:
            metrics = await _listen(self._metrics, listen.metrics_host, listen.metrics_port, "metrics")
        if listen.grpc_port is not None:
            try:
                await self._rpc.start(listen.grpc_host, listen.grpc_port)
            except OSError as error:
                raise NotStarted(_no_port(listen.grpc_host, listen.grpc_port, "gRPC", error)) from error
            except BadPair as error:  # the files were valid when the options were read
                raise NotStarted(f"gRPC: {error}") from error
            grpc = http1.authority(listen.grpc_host, self._rpc.port)
        return http, grpc, metrics

    async def _started(self, stop: asyncio.Event, watcher: Watcher) -> Sequence[str]:
        """Report progress until startup is over or `stop` is set; returns the models' problems."""
        while not stop.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    return await self._server.started()
            with suppress(Refused):
                watcher.loading(self._server.index(False))
        return ()

    def _handle_metrics(self, exchange: Exchange) -> None:
        if exchange.target.partition(b"?")[0] != METRICS:
            exchange.respond(404, [], b"")
            return
        self._tasks.create_task(self._tell(exchange))

    async def _tell(self, exchange: Exchange) -> None:
        self._show.own = await self._server.measure()
        self._show.memory = self._server.memory()
        self._show.cache = self._server.cache
        self._show.traces_lost = self._files.lost
        self._show.certificate_ends_s = self._rpc.certificate_ends_s
        exchange.respond(200, [(b"content-type", CONTENT_TYPE)], self._show.render())


def _describe(exchange: Exchange) -> None:
    if exchange.method in (b"GET", b"HEAD"):
        exchange.respond(200, [http1.JSON], modelserver.document(__version__))
    else:
        refuse_method(exchange, b"GET, HEAD")


async def _listen(server: HttpServer, host: str, port: int, what: str) -> str:
    try:
        await server.start(host, port)
    except OSError as error:
        raise NotStarted(_no_port(host, port, what, error)) from error
    return http1.authority(host, server.port)


def _no_port(host: str, port: int, what: str, error: OSError) -> str:
    where, kind = http1.authority(host, port), what.lower()
    if error.errno == errno.EADDRINUSE:
        return f"cannot listen on {where} for {what}: the port is in use; --{kind}-port selects another (0: any)"
    advice = f"--host and --{kind}-address select an address, --{kind}-port a port (0: any)"
    return f"cannot listen on {where} for {what}: {error.strerror or error}; {advice}"
