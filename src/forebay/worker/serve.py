"""The lifecycle of a worker: listens, publishes its address, keeps the engine running, drains on request, exits."""

import asyncio
import signal
from pathlib import Path

import structlog

from forebay import __version__
from forebay.core.leading.lease import expired_text
from forebay.core.model import WorkerSpec
from forebay.net.ports import listen
from forebay.net.replica_protocol import GATEWAY, lease_expiry
from forebay.net.server import HttpServer
from forebay.obs.metrics import Metrics
from forebay.worker.channel import Configure
from forebay.worker.engine_process import EngineProcess, GaveUp
from forebay.worker.meters import Meters
from forebay.worker.shell import Shell

CLOSE_GRACE_S = 1.0
"""How long connections get to receive their last response."""


async def serve(spec: WorkerSpec, log: structlog.stdlib.BoundLogger) -> None:
    """Run the worker until SIGTERM or SIGINT, then drain. Raises `GaveUp` or `net.ports.NoPort`."""
    settings = spec.settings
    if spec.engine == "synthetic":  # the only engine whose task cannot be read from an artifact
        settings = {"task": spec.task.value, **settings}
    engine = EngineProcess(
        Configure(spec.engine, spec.artifact, settings),
        hang_s=spec.engine_hang_s,
        load_timeout_s=spec.engine_load_timeout_s,
        log=log,
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await run(spec, log, stop, engine, Shell(spec, engine, Meters(Metrics(), spec, __version__), log))


async def run(
    spec: WorkerSpec, log: structlog.stdlib.BoundLogger, stop: asyncio.Event, engine: EngineProcess, shell: Shell
) -> None:
    """Run a worker until `stop` is set, then drain. Raises `GaveUp` or `net.ports.NoPort`."""
    server = HttpServer(shell.handle, spec.limits, refused=shell.refused, alive_for=GATEWAY)
    await listen(server, spec.host, spec.port_first, Path(spec.endpoint_path))
    log.info("listening", host=spec.host, port=server.port)
    gave_up: GaveUp | None = None
    async with asyncio.TaskGroup() as tasks:
        drain = tasks.create_task(_drain_at_stop(stop, shell, engine, spec.drain_grace_s, log))
        fence = tasks.create_task(_fence_at_lease_expiry(shell, engine, spec.lease_s, log))
        try:
            await engine.run()
        except GaveUp as error:
            gave_up = error
        drain.cancel()
        fence.cancel()
    if shell.fenced:
        gave_up = GaveUp(expired_text(spec.lease_s))
    await server.drain(CLOSE_GRACE_S)
    server.close()
    if gave_up is not None:
        raise gave_up


async def _fence_at_lease_expiry(
    shell: Shell, engine: EngineProcess, lease_s: float, log: structlog.stdlib.BoundLogger
) -> None:
    if not lease_s:
        return
    await lease_expiry(shell, lease_s)
    log.error("fenced", reason=expired_text(lease_s), left=shell.report().in_flight)
    shell.fence()
    engine.stop()


async def _drain_at_stop(
    stop: asyncio.Event, shell: Shell, engine: EngineProcess, grace_s: float, log: structlog.stdlib.BoundLogger
) -> None:
    await stop.wait()
    log.info("draining", grace_s=grace_s)
    if not await shell.drain(grace_s):
        log.warning("drained incompletely", left=shell.report().in_flight)
    engine.stop()
