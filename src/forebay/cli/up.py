"""`forebay up`: from a cluster to a running one, and down again in order."""

import asyncio
import fcntl
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import msgspec
from rich.console import Console

from forebay.cli.build import Parts, build, prepare_models
from forebay.cli.doctor import check_certificate
from forebay.cli.registry.opening import forget
from forebay.cli.reload import Reloader
from forebay.cli.settings import INTERRUPTED, UserError
from forebay.cli.view.screen import Screen
from forebay.control.loop import Controller
from forebay.control.plan import Artifact, Places, Plan
from forebay.control.ports import Taken, bind
from forebay.control.status import Status, make_status
from forebay.core.cluster import Cluster
from forebay.core.model import Endpoint, Task
from forebay.obs.clock import wall_s
from forebay.providers.processes import identify, session_leaders
from forebay.store.database import StoreError
from forebay.wire.documents import UNREADABLE

SHOW_EVERY_S = 0.2
BACKLOG = 128
NOT_BEGUN = "Nothing was started or stopped; what ran before runs on."
ACCESS = {
    "off": "no API key is asked for, so only this machine can reach it (gateway.auth: off)",
    "open": "no API key is asked for: open to everybody who can reach it (gateway.auth: open)",
    "keys": "asks for an API key; `forebay keys create --tenant NAME` makes one",
}
"""What `gateway.auth` means, by its values."""


class Holder(msgspec.Struct, frozen=True):
    """Content of the lock file: who runs the cluster."""

    pid: int
    since: float


def run_up(
    cluster: Cluster,
    home: Path,
    console: Console,
    read: Callable[[], Cluster] | None = None,
    parse: Callable[[str], Cluster] | None = None,
) -> int:
    """Run a cluster until Ctrl-C or SIGTERM; the exit code. Raises `UserError` for what the user can mend.

    `read` reads the cluster file again, for `forebay reload` and SIGHUP; None: there is none. `parse` makes a cluster
    of a document that `forebay apply` sends; None: none is taken.
    """
    home = home.absolute()
    places = Places(home / "run" / cluster.name)
    try:
        places.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{places.folder}: {error.strerror}. Set FOREBAY_HOME to a folder you can write.") from error
    began = wall_s()
    with _only_one(places, cluster.name), Screen(console) as screen:
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
            parts = build(cluster, artifacts, places, screen.event, home=home, read=read, parse=parse)
            asyncio.run(_run(parts, listener, screen, began))
            forget(cluster)
    return 0


@contextmanager
def _only_one(places: Places, name: str) -> Iterator[None]:
    """Hold the lock of the cluster; the kernel lets go of it however this process ends."""
    with places.lock.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(_held(file.read(), name)) from None
        file.truncate(0)
        file.write(msgspec.json.encode(Holder(os.getpid(), wall_s())))
        file.flush()
        yield


def _held(content: bytes, name: str) -> str:
    try:
        holder = msgspec.json.decode(content, type=Holder)
    except UNREADABLE:
        return f"cluster {name} is being run by another process"
    since = datetime.fromtimestamp(holder.since).isoformat(" ", "seconds")
    return (
        f"cluster {name} is run by process {holder.pid} since {since}. "
        f"Stop it with Ctrl-C there or `kill {holder.pid}`, or give this cluster another `name`."
    )


def _take_ports(cluster: Cluster, places: Places) -> socket.socket:
    """The bound socket of the admin API; the gateway's port is free, or held by a gateway of this very cluster."""
    own = {pid for pid, _ in session_leaders(places.folder / "units")}
    problems = []
    gateway = bind(cluster.gateway.host, cluster.gateway.port)
    if isinstance(gateway, Taken):
        if not gateway.pids or not own.issuperset(gateway.pids):
            problems.append(f"the gateway: {gateway.why}. Stop that, or change gateway.port or gateway.host.")
    else:
        gateway.close()
    admin = bind(cluster.admin.host, cluster.admin.port)
    if isinstance(admin, Taken):
        problems.append(f"the admin API: {admin.why}. Stop that, or change admin.port or admin.host.")
    if problems or isinstance(admin, Taken):
        if not isinstance(admin, Taken):
            admin.close()
        raise UserError("\n".join(problems))
    admin.listen(BACKLOG)
    return admin


def _clear_peers(places: Places) -> None:
    """Gateways that were killed leave word of where they listened."""
    for path in places.peers.glob("*.json"):
        try:
            endpoint = msgspec.json.decode(path.read_bytes(), type=Endpoint)
        except (OSError, *UNREADABLE):
            endpoint = None
        if endpoint is None or identify(endpoint.pid) is None:
            path.unlink(missing_ok=True)


def _prepare(cluster: Cluster, home: Path, screen: Screen) -> dict[str, Artifact]:
    """All models, or all that is wrong with them."""
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
        raise UserError(f"what is deployed is not known: {error}\n{NOT_BEGUN}") from error

    def stop() -> None:
        screen.still()
        if control.stopping:
            screen.line("stopping at once: what runs is cut off", "red")
            control.kill()
        else:
            control.stop()
            screen.line("Ctrl-C once more cuts off what still runs.", "dim")

    hung_up, terminal = asyncio.Event(), _has_terminal()

    def hang_up() -> None:
        if terminal and not _has_terminal():
            stop()
        else:
            hung_up.set()

    for number, act in ((signal.SIGINT, stop), (signal.SIGTERM, stop), (signal.SIGHUP, hang_up)):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup means it
            loop.add_signal_handler(number, act)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(parts.server.run_on(listener))
            reloading = tasks.create_task(_reload_on(hung_up, parts.reload))
            showing = tasks.create_task(_show(parts, screen, began, listener.getsockname()))
            await control.run()
            parts.server.stop()
            showing.cancel()
            reloading.cancel()
    finally:
        await parts.close()
    screen.line("stopped; no process is left")


def _has_terminal() -> bool:
    """Whether there is a terminal to press Ctrl-C at. When it is closed, SIGHUP comes too, and means to stop."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def _reload_on(asked: asyncio.Event, reload: Reloader) -> None:
    """Read the cluster file again whenever it is asked for; several requests at once are one."""
    while True:
        await asked.wait()
        asked.clear()
        await reload("SIGHUP")


def _status(control: Controller) -> Status:
    return make_status(control, asyncio.get_running_loop().time(), wall_s())


async def _show(parts: Parts, screen: Screen, began: float, admin: tuple[str, int]) -> None:
    """Follow the start until everything is ready, then say so once."""
    await parts.control.look()
    if screen.adopted:
        screen.line(f"adopted {screen.adopted} running processes")
    while not (status := _status(parts.control)).complete:
        screen.starting(status)
        await asyncio.sleep(SHOW_EVERY_S)
    screen.still()
    screen.line(f"\nready after {wall_s() - began:.1f} s\n", "bold green")
    screen.line(f"  OpenAI API  {parts.plan.gateway_url}/v1")
    if parts.plan.gateway_url.startswith("https:"):
        screen.line("  TLS         clients use a name that the certificate holds, and trust its CA (curl --cacert)")
    screen.line(f"  access      {ACCESS[parts.plan.auth]}")
    asks = "; asks for a key: forebay keys create --admin ROLE" if parts.reload.cluster.admin.auth == "keys" else ""
    screen.line(f"  admin API   http://{admin[0]}:{admin[1]}/v1/status{asks}")
    screen.line(f"\n{_example(parts.plan)}\n")
    screen.line("Ctrl-C stops the cluster.", "dim")
    if parts.reload.read is not None:
        screen.line("`forebay reload` takes over what is changed in its file.", "dim")


def _example(plan: Plan) -> str:
    """A request to copy into a shell."""
    routes = [model.routes for model in plan.models]
    model = next((r for r in routes if r.task is Task.CHAT), routes[0])
    key = ' \\\n  -H "authorization: Bearer $FOREBAY_API_KEY"' if plan.auth == "keys" else ""
    if model.task is Task.TENSOR:
        return f"curl {plan.gateway_url}/v2/models/{model.name}{key}"
    if model.task is Task.CHAT:
        path, rest = (
            "chat/completions",
            '"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32, "temperature": 0',
        )
    else:
        path, rest = "embeddings", '"input": "A forebay feeds the turbines."'
    body = f'{{"model": "{model.name}", {rest}}}'
    return f"curl {plan.gateway_url}/v1/{path} \\\n  -H 'content-type: application/json'{key} \\\n  -d '{body}'"
