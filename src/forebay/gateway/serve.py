"""A gateway process from start to end: listen, publish its endpoint, follow the snapshot, drain on a signal, exit."""

import asyncio
import contextlib
import os
import signal
import socket
from pathlib import Path
from random import Random
from typing import Final

import structlog

from forebay.core.model import Endpoint, GatewaySpec, Limits
from forebay.gateway import pages
from forebay.gateway.gateway import Gateway
from forebay.gateway.polling import Fleet
from forebay.gateway.records.accesslog import AccessLog
from forebay.gateway.records.entries import RequestLog
from forebay.gateway.records.recorder import Recorder
from forebay.gateway.scheduling.scheduler import Scheduler
from forebay.gateway.tenancy import AccessControl
from forebay.net.cors import Cors
from forebay.net.outbox import Outbox
from forebay.net.server import HttpServer
from forebay.net.tls import BadPair, CertificateReloader
from forebay.obs.metrics import Metrics

TICK_S: Final = 0.25
"""How often a gateway checks its files and timers. All in one tick: in an otherwise idle process each wakeup costs
ten times as much as in a busy one, and stops an engine's threads. A revoked key works for this long at most."""
PEERS_EVERY_S: Final = 1.0
PRIVATE_LIMITS: Final = Limits(connections_max=64, head_timeout_s=2.0, idle_timeout_s=10.0)
LINGER_S: Final = 1.5
"""How long clients with an idle connection may still use it, and learn that it closes, when a gateway stops."""
UNSENT_BYTES_MAX: Final = 65_536
"""Bytes in the kernel's send buffer count as sent, and their text is kept for a resume: a slow client would cost
megabytes of both."""
LAST_WORDS_S: Final = 1.0
"""How long clients have to receive their error once the drain grace period is over."""
LOOPBACK: Final = "127.0.0.1"


class NoPort(Exception):  # noqa: N818 - states the condition
    """The public listener could not be started: the port is taken, or the certificate is bad. The text is for the
    user."""


async def serve(spec: GatewaySpec, log: structlog.stdlib.BoundLogger) -> None:
    """Run a gateway until SIGTERM or SIGINT. Raises `NoPort`."""
    signals: asyncio.Queue[int] = asyncio.Queue(maxsize=16)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _note, signals, number)
    await run(spec, log, AccessLog(), signals, Random())  # noqa: S311 - balancing, not secrecy


async def run(
    spec: GatewaySpec,
    log: structlog.stdlib.BoundLogger,
    access: AccessLog,
    signals: "asyncio.Queue[int]",
    rng: Random,
    *,
    outbox: Outbox | None = None,
) -> None:
    """Run a gateway until the first signal, then drain; a second signal ends it at once. Raises `NoPort`.

    `outbox` batches its writes within an iteration of the loop; by default it has its own.
    """
    metrics = Metrics()
    recorder = Recorder(spec.records, spec.id, log) if spec.records is not None else None
    scheduler = Scheduler(spec, RequestLog(access, recorder, spec.trusted_proxies), rng)
    gateway = Gateway(scheduler, metrics)
    no_port: NoPort | None = None
    async with asyncio.TaskGroup() as group:
        page = pages.Pages(gateway, spec, metrics, group, Cors(spec.cors_origins) if spec.cors_origins else None)
        fleet = Fleet(gateway, spec, group, log, outbox)
        public = HttpServer(page.handle, spec.limits, wants_body=page.wants_body, outbox=fleet.outbox)
        public.refused, public.refusal_id = gateway.refused, page.refusal_id
        private = HttpServer(page.handle_private, PRIVATE_LIMITS, wants_body=lambda _: False)
        page.public = public
        background = [
            group.create_task(_tick(gateway, fleet, page)),
            group.create_task(_log(access)),
            group.create_task(_keep(gateway, page, metrics, recorder)),
            group.create_task(_count_peers(gateway, spec)),
        ]
        if spec.tenancy is not None:
            gateway.access = AccessControl(spec.id, spec.tenancy, log, now=gateway.now)
            gateway.access.start()
        renewal = CertificateReloader(spec.tls, log, metrics) if spec.tls is not None else None
        try:
            if recorder is not None:
                recorder.start()
            await _listen(public, private, spec, renewal)
            if renewal is not None:
                background.append(group.create_task(renewal.follow()))
            log.info("listening", host=spec.host, port=public.port, private_port=private.port)
            await signals.get()
            log.info("draining", grace_s=spec.drain_grace_s, connections=public.connections)
            page.draining = True
            if gateway.access is not None:
                gateway.access.leave()
            await _drain(public, spec.drain_grace_s, signals, log)
            scheduler.close()
            await public.drain(LAST_WORDS_S)
        except NoPort as error:  # re-raised below: the task group would wrap it in an exception group
            no_port = error
        finally:
            _withdraw(spec, gateway)
            for each in (public, private, fleet):
                each.close()
            for task in background:
                task.cancel()
    access.flush()
    if recorder is not None:
        recorder.close()
    if no_port is not None:
        raise no_port
    log.info("stopped")


def _withdraw(spec: GatewaySpec, gateway: Gateway) -> None:
    """Remove what other processes find this one by."""
    pages.withdraw(_peer_file(spec))
    if gateway.access is not None:
        gateway.access.leave_for_good()


def _note(signals: "asyncio.Queue[int]", number: int) -> None:
    if not signals.full():
        signals.put_nowait(number)


async def _drain(
    public: HttpServer, grace_s: float, signals: "asyncio.Queue[int]", log: structlog.stdlib.BoundLogger
) -> None:
    async with asyncio.TaskGroup() as group:
        drained = group.create_task(public.drain(grace_s, LINGER_S))
        again = group.create_task(signals.get())
        await asyncio.wait((drained, again), return_when=asyncio.FIRST_COMPLETED)
        if public.connections:
            log.warning("drained incompletely", connections=public.connections)
        drained.cancel()
        again.cancel()


async def _tick(gateway: Gateway, fleet: Fleet, page: pages.Pages) -> None:
    """Apply file changes and expired timers."""
    while True:
        fleet.look()
        if gateway.access is not None and not page.draining:
            gateway.access.look()
        gateway.scheduler.expire()
        await asyncio.sleep(TICK_S)


async def _log(access: AccessLog) -> None:
    """Write the access log, as fast as its reader takes it."""
    while True:
        await access.flush_aside()
        await asyncio.sleep(TICK_S)


async def _keep(gateway: Gateway, page: pages.Pages, metrics: Metrics, recorder: Recorder | None) -> None:
    """Persist counts and records, as fast as the disk takes them: requests do not wait for it."""
    while True:
        if gateway.access is not None:
            await gateway.access.save_aside()
        if recorder is not None:
            await recorder.flush_aside(gateway.now())
            metrics.counter("records_lost_total").value = recorder.lost
            metrics.gauge("records_failing").set(recorder.failing)
        await asyncio.sleep(TICK_S)


async def _count_peers(gateway: Gateway, spec: GatewaySpec) -> None:
    """Track how many gateways send to the same replicas: each has sent about as much as this one since a report."""
    while True:
        with contextlib.suppress(OSError):  # without file descriptors the count stays as it is
            gateways = 1 + len(pages.peers(spec))
            for served in gateway.served.values():
                served.pricing.gateways = gateways
        await asyncio.sleep(PEERS_EVERY_S)


async def _listen(
    public: HttpServer, private: HttpServer, spec: GatewaySpec, renewal: CertificateReloader | None
) -> None:
    """Listen for peers and for clients, and publish the endpoints."""
    try:
        tls = renewal.start() if renewal is not None else None
        await private.start(LOOPBACK, 0)
        succeeds = pages.running(_peer_file(spec)) is not None  # the predecessor still listens
        pages.write(_peer_file(spec), Endpoint(os.getpid(), LOOPBACK, private.port))
        if not succeeds:
            _check_port(spec)
        await public.start(spec.host, spec.port, reuse_port=True, tls=tls, unsent_bytes_max=UNSENT_BYTES_MAX)
    except BadPair as error:
        raise NoPort(f"cannot serve HTTPS on {spec.host}:{spec.port}: {error}") from error
    except OSError as error:
        raise NoPort(f"cannot listen on {spec.host}:{spec.port}: {error.strerror or error}") from error
    pages.write(Path(spec.endpoint_path), Endpoint(os.getpid(), spec.host, public.port))


def _check_port(spec: GatewaySpec) -> None:
    """Share the port with gateway processes of this cluster only.

    With SO_REUSEPORT alone two clusters of one user could share a port unnoticed, and get each other's requests.
    """
    if pages.peers(spec) or not spec.port:
        return
    with socket.socket(socket.AF_INET6 if ":" in spec.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((spec.host, spec.port))
        except OSError:
            if not pages.peers(spec):  # a peer may have started meanwhile
                raise


def _peer_file(spec: GatewaySpec) -> Path:
    return Path(spec.peers_dir) / f"{spec.id}.json"
