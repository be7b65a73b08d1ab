"""A replica from start to end: listen, announce the address, load the model, serve, drain when stopped, exit."""

import asyncio
import os
import resource
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from forebay import __version__
from forebay.core.leading.lease import expired_text
from forebay.core.model import WorkerSpec
from forebay.core.serving.errors import Refused
from forebay.engines.tensor.gpus import VISIBLE, computing, visible
from forebay.modelserver.http.front import HttpFront
from forebay.modelserver.http.options import FrontOptions
from forebay.modelserver.models.options import Control, Options
from forebay.modelserver.ports import Models
from forebay.modelserver.process.segments import Staging
from forebay.modelserver.regions import SharedRegions
from forebay.modelserver.replica.aliased import AliasedModel
from forebay.modelserver.replica.choosing import Choice, choose_model
from forebay.modelserver.replica.front import ReplicaFront
from forebay.modelserver.replica.report import Reporter
from forebay.modelserver.repository import Rules
from forebay.modelserver.server import ModelServer
from forebay.modelserver.telemetry.logs import LogSettings
from forebay.modelserver.telemetry.settings import ServerSettings
from forebay.modelserver.telemetry.tracing import TraceSettings, Tracing
from forebay.net.ports import PORTS_MAX, NoPort, listen
from forebay.net.replica_protocol import GATEWAY, lease_expiry
from forebay.net.server import HttpServer
from forebay.obs.metrics import Metrics

if TYPE_CHECKING:
    from forebay.modelserver.rpc.front import RpcFront

CLOSE_GRACE_S: Final = 1.0
"""How long connections may take for their last response, and models to finish after the drain."""
LOOK_EVERY_S: Final = 1.0


class GaveUp(Exception):  # noqa: N818 - states the condition
    """The model cannot be served, or no longer; the text is printed before the process exits."""


async def serve(spec: WorkerSpec, log: structlog.stdlib.BoundLogger) -> None:
    """Run until SIGTERM or SIGINT, then drain. Raises `GaveUp` or `net.ports.NoPort`."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        choice = choose_model(Path(spec.artifact), spec.model, str(spec.settings.get("model", "")))
    except (Refused, OSError) as error:
        raise GaveUp(str(error)) from error
    await run(spec, choice, log, stop)


async def run(spec: WorkerSpec, choice: Choice, log: structlog.stdlib.BoundLogger, stop: asyncio.Event) -> None:
    """Run until `stop` is set, then drain. Raises `GaveUp` or `net.ports.NoPort`."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # each segment that an input arrives in takes a descriptor per instance; the usual limit is 1,024
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    failed: GaveUp | NoPort | None = None
    async with asyncio.TaskGroup() as tasks:
        try:
            await _run(spec, choice, log, stop, tasks)
        except (GaveUp, NoPort) as error:  # raised below: a task group would wrap it in an exception group
            failed = error
    if failed is not None:
        raise failed


async def _run(
    spec: WorkerSpec,
    choice: Choice,
    log: structlog.stdlib.BoundLogger,
    stop: asyncio.Event,
    tasks: asyncio.TaskGroup,
) -> None:
    metrics = Metrics()
    options = _options(spec, choice)
    server = ModelServer(options, log)
    aliased = AliasedModel(server, spec.model, choice.model, metrics, spec.replica, strict=options.strict_readiness)
    reporter = Reporter(spec, server, aliased, metrics, __version__)
    staging = Staging()
    settings, regions = (
        ServerSettings(aliased, TraceSettings(Tracing()), LogSettings()),
        SharedRegions(staging=staging),
    )
    how = FrontOptions(version=__version__, json_bytes_max=spec.limits.body_bytes_max)
    models = HttpFront(aliased, regions, settings, tasks=tasks, log=log, options=how, staging=staging)
    front = ReplicaFront(spec, aliased, reporter, models, metrics, tasks=tasks)
    http = HttpServer(front.handle, spec.limits, refused=front.refused, alive_for=GATEWAY, place=models.place)
    rpc: RpcFront | None = None
    running: asyncio.Task[None] | None = None
    try:
        rpc = await _rpc(spec, aliased, regions, settings, log, tasks=tasks)
        reporter.grpc_port = rpc.port if rpc is not None else 0
        await listen(http, spec.host, spec.port_first, Path(spec.endpoint_path))
        log.info("listening", host=spec.host, port=http.port, grpc_port=reporter.grpc_port)
        running = tasks.create_task(server.run())
        fencing = tasks.create_task(_fence_at_lease_expiry(reporter, spec.lease_s, stop))
        try:
            await _until_stopped(server, aliased, stop, tasks)
            if reporter.fenced:
                raise GaveUp(expired_text(spec.lease_s))
        finally:
            fencing.cancel()
        log.info("draining", grace_s=spec.drain_grace_s)
        reporter.draining = True
        if rpc is not None:
            await rpc.stop(spec.drain_grace_s)
        if not await _drained(aliased, spec.drain_grace_s):
            log.warning("drained incompletely", left=aliased.in_flight)
    finally:
        server.stop()
        try:
            if running is not None:
                await running
                await http.drain(CLOSE_GRACE_S)
            if rpc is not None:
                await rpc.stop(0)
        finally:  # also if this is cancelled meanwhile
            http.close()


async def _rpc(
    spec: WorkerSpec,
    models: Models,
    regions: SharedRegions,
    settings: ServerSettings,
    log: structlog.stdlib.BoundLogger,
    *,
    tasks: asyncio.TaskGroup,
) -> "RpcFront | None":
    """Start the gRPC front on the first free port, if configured. Raises `GaveUp` or `net.ports.NoPort`."""
    first = int(spec.settings.get("grpc_port_first", 0))
    if not first:
        return None
    try:
        from forebay.modelserver.rpc.front import RpcFront, RpcOptions
    except ImportError as error:
        text = (
            f"gRPC needs a library that cannot be imported ({error}); install it with: pip install 'forebay[triton]'"
        )
        raise GaveUp(text) from error
    options = RpcOptions(version=__version__, messages_bytes_max=spec.limits.bodies_bytes_max)
    for port in range(first, min(first + PORTS_MAX, 65_536)):
        rpc = RpcFront(models, regions, settings, tasks=tasks, log=log, options=options)
        try:
            await rpc.start(spec.host, port)
        except OSError:
            continue
        return rpc
    raise NoPort(f"no free port for gRPC on {spec.host} from {first}")


def _options(spec: WorkerSpec, choice: Choice) -> Options:
    everything = spec.settings.get("load") == "all"
    gpus = visible({VISIBLE: os.environ.get(VISIBLE, "")})  # control sets it if the replica's place has GPUs
    return Options(
        repositories=(choice.repository,),
        control=Control.EXPLICIT,
        startup=("*",) if everything else (choice.model,),
        rules=Rules(gpus=tuple(range(len(gpus))), gpu_backends=computing()),
        gpus=gpus,
        strict_readiness=not everything,  # problems of another model must not keep this one from being served
        hang_s=spec.engine_hang_s,
        load_timeout_s=spec.engine_load_timeout_s,
        drain_s=CLOSE_GRACE_S,
    )


async def _until_stopped(
    server: ModelServer, aliased: AliasedModel, stop: asyncio.Event, tasks: asyncio.TaskGroup
) -> None:
    """Wait for `stop`. Raises `GaveUp` once the model is not served (any more)."""
    asked = tasks.create_task(stop.wait())
    started = tasks.create_task(server.started())
    try:
        await asyncio.wait((asked, started), return_when=asyncio.FIRST_COMPLETED)
        while not asked.done():
            reason = _unserved(server, aliased)
            if reason:
                raise GaveUp("\n".join((reason, *started.result())))
            await asyncio.wait((asked,), timeout=LOOK_EVERY_S)
    finally:
        asked.cancel()
        started.cancel()


def _unserved(server: ModelServer, aliased: AliasedModel) -> str:
    try:
        server.view(aliased.model, "")
    except Refused as refused:
        return "; ".join(each.reason for each in aliased.index(False) if each.reason) or refused.text
    return ""


async def _fence_at_lease_expiry(reporter: Reporter, lease_s: float, stop: asyncio.Event) -> None:
    """Stop once the lease has ended. Work in progress is abandoned: nothing waits for it any more."""
    if not lease_s:
        return
    await lease_expiry(reporter, lease_s)
    reporter.fenced = True
    stop.set()


async def _drained(aliased: AliasedModel, grace_s: float) -> bool:
    try:
        async with asyncio.timeout(grace_s):
            await aliased.idle()
    except TimeoutError:
        return False
    return True
