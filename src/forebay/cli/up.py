"""`forebay up`: starts a cluster, and stops it in order."""

import asyncio
import fcntl
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from io import FileIO
from pathlib import Path

import msgspec
from rich.console import Console

from forebay.cli.build import Parts, build
from forebay.cli.doctor import check_certificate
from forebay.cli.registry.artifacts import prepare_models
from forebay.cli.registry.opening import forget, store_of
from forebay.cli.running.address import Holder, admin_url
from forebay.cli.running.several import Several
from forebay.cli.running.startup import has_terminal, reload_on, show
from forebay.cli.settings import INTERRUPTED, UserError
from forebay.cli.view.screen import Screen
from forebay.control.plan import Artifact, Places
from forebay.control.ports import Taken, bind
from forebay.core.cluster import Cluster
from forebay.core.model import Endpoint
from forebay.obs.clock import wall_s
from forebay.providers.processes import identify, session_leaders
from forebay.store.database import StoreError
from forebay.wire.documents import UNREADABLE

BACKLOG = 128
NOT_BEGUN = "Nothing was started or stopped; what was running keeps running."


def run_up(
    cluster: Cluster,
    home: Path,
    console: Console,
    read: Callable[[], Cluster] | None = None,
    parse: Callable[[str], Cluster] | None = None,
) -> int:
    """Run a cluster until Ctrl-C or SIGTERM; returns the exit code. Raises `UserError` for errors that the user can
    fix.

    With `control.controllers: several` it waits while another process runs the cluster. `read` reads the cluster file
    again, for `forebay reload` and SIGHUP; None: there is none. `parse` parses a document of `forebay apply`; None:
    not allowed.
    """
    home = home.absolute()
    places = Places(home / "run" / cluster.name)
    try:
        places.folder.mkdir(parents=True, exist_ok=True)
        lock = places.lock.open("a+b", buffering=0)
    except OSError as error:
        raise _not_writable(places, error) from error
    began = wall_s()
    several = cluster.control.controllers == "several"
    with lock, _locked(lock, places, cluster, shared=several), Screen(console) as screen:
        listener = _take_ports(cluster, places)
        with listener:
            try:
                artifacts = _prepare(cluster, home, screen)
            except KeyboardInterrupt:
                return INTERRUPTED
            _clear_peers(places)
            if cluster.gateway.tls:
                certificate = check_certificate(cluster.gateway.tls.value())
                if certificate.advice:
                    screen.line(f"the certificate {certificate.found}: {certificate.advice}", "yellow")

            make = partial(build, places=places, tell=screen.event, home=home, read=read, parse=parse)
            if not several:
                asyncio.run(_run(make(cluster, artifacts), listener, screen, began))
            else:
                control = Several(
                    cluster,
                    artifacts,
                    make,
                    opened=partial(store_of, cluster, home),
                    places=places,
                    screen=screen,
                    listener=listener,
                    read=read,
                    prepare=partial(prepare_models, home=home, progress=lambda _: _no_progress),
                )
                if not asyncio.run(control.run()):
                    return 0
            forget(cluster)
    return 0


def _no_progress(stage: str, done: int, total: int | None) -> None:
    """Progress callback for preparations during a takeover, which are not shown."""


@contextmanager
def _locked(file: FileIO, places: Places, cluster: Cluster, *, shared: bool) -> Iterator[None]:
    """Hold the cluster's lock, exclusively or shared with other controllers; the kernel releases it however the
    process ends."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise UserError(_held(file.read(), cluster.name)) from None
    file.truncate(0)
    this = identify(os.getpid())
    assert this is not None
    try:
        file.write(msgspec.json.encode(Holder(this, wall_s(), admin_url(cluster))))
    except OSError as error:
        raise _not_writable(places, error) from error
    yield


def _not_writable(places: Places, error: OSError) -> UserError:
    return UserError(f"{places.folder}: {error.strerror}. Set FOREBAY_HOME to a folder you can write to.")


def _held(content: bytes, name: str) -> str:
    try:
        holder = msgspec.json.decode(content, type=Holder)
    except UNREADABLE:
        return f"cluster {name} is being run by another process"
    since = datetime.fromtimestamp(holder.since).isoformat(" ", "seconds")
    return (
        f"cluster {name} is run by process {holder.process.pid} since {since}. "
        f"Stop it with Ctrl-C there or `kill {holder.process.pid}`, or give this cluster another `name`."
    )


def _take_ports(cluster: Cluster, places: Places) -> socket.socket:
    """The bound socket of the admin API; the gateway's port is free, or used by a gateway of this cluster."""
    several = cluster.control.controllers == "several"
    own = {pid for pid, _ in session_leaders(places.folder / "units")}
    problems = []
    gateway = bind(cluster.gateway.host, cluster.gateway.port)
    if isinstance(gateway, Taken):
        if not gateway.pids or not own.issuperset(gateway.pids):
            problems.append(f"the gateway: {gateway.why}; {gateway.remedy} gateway.port or gateway.host.")
    else:
        gateway.close()
    admin = bind(cluster.admin.host, cluster.admin.port)
    if isinstance(admin, Taken):
        own_port = "; each controller needs its own: `--set admin.port=PORT`" if several else ""
        problems.append(f"the admin API: {admin.why}; {admin.remedy} admin.port or admin.host{own_port}.")
    if problems or isinstance(admin, Taken):
        if not isinstance(admin, Taken):
            admin.close()
        raise UserError("\n".join(problems))
    admin.listen(BACKLOG)
    return admin


def _clear_peers(places: Places) -> None:
    """Remove endpoint files of killed gateways."""
    for path in places.peers.glob("*.json"):
        try:
            endpoint = msgspec.json.decode(path.read_bytes(), type=Endpoint)
        except (OSError, *UNREADABLE):
            endpoint = None
        if endpoint is None or identify(endpoint.pid) is None:
            path.unlink(missing_ok=True)


def _prepare(cluster: Cluster, home: Path, screen: Screen) -> dict[str, Artifact]:
    """The artifacts of all models. Raises `UserError` with the problems of all of them."""
    try:
        return prepare_models(cluster, home, screen.progress)
    except UserError as error:
        raise UserError(f"{error}\nNothing was started.") from error
    finally:
        for model in cluster.models:
            screen.done(model.name)


async def _run(parts: Parts, listener: socket.socket, screen: Screen, began: float) -> None:
    control = parts.control
    loop = asyncio.get_running_loop()
    try:
        await parts.deployments.begin(parts.plan)
    except StoreError as error:
        await parts.close()
        raise UserError(f"the deployed revisions are unknown: {error}\n{NOT_BEGUN}") from error

    def stop() -> None:
        screen.stop_bars()
        if control.stopping:
            screen.line("stopping at once: running requests are cut off", "red")
            control.kill()
        else:
            control.stop()
            screen.line("Press Ctrl-C again to stop at once.", "dim")

    hung_up, terminal = asyncio.Event(), has_terminal()

    def hang_up() -> None:
        if terminal and not has_terminal():
            stop()
        else:
            hung_up.set()

    for number, act in ((signal.SIGINT, stop), (signal.SIGTERM, stop), (signal.SIGHUP, hang_up)):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it
            loop.add_signal_handler(number, act)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(parts.server.run_on(listener))
            reloading = tasks.create_task(reload_on(hung_up, parts.reload))
            showing = tasks.create_task(show(parts, screen, began, listener.getsockname()))
            await control.run()
            parts.server.stop()
            showing.cancel()
            reloading.cancel()
    finally:
        await parts.close()
    screen.line("stopped; no process is left")
