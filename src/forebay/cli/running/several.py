"""`forebay up` as one of several controllers of a cluster: it waits as a follower, leads, and follows again when
deposed.

Each term builds a new control plane from what then runs, what is stored, and the cluster file. Stopping the leading
controller stops just that one while another one waits, and the cluster if none does.
"""

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from enum import Enum, auto
from typing import Any, Final, Protocol, TypeVar

from forebay.cli.build import Parts
from forebay.cli.running.startup import has_terminal, reload_on, show
from forebay.cli.settings import UserError
from forebay.cli.view.screen import Screen
from forebay.control.changes import changes, needs_restart
from forebay.control.leading.candidate import Candidate
from forebay.control.leading.term import Leading, Term
from forebay.control.plan import Artifact, Places
from forebay.core.cluster import Cluster
from forebay.obs.clock import wall_s
from forebay.store.database import Store, StoreError
from forebay.store.leadership import Leadership
from forebay.wire.http1 import authority

T = TypeVar("T")
Artifacts = Mapping[str, Artifact]
AGAIN_S: Final = 0.5
"""Pause before retrying to read what is deployed, if the store was unavailable."""
RESIGN_S: Final = 5.0
"""How long to try to tell the store that the term ends; otherwise it notices when the lease expires."""


class Make(Protocol):
    """Wires a control plane."""

    def __call__(self, cluster: Cluster, artifacts: Artifacts, *, leading: Leading | None = None) -> Parts:
        """The components, not started."""


class End(Enum):
    """How a term ended."""

    STOPPED = auto()
    """Together with the cluster."""
    LEFT = auto()
    """This controller leaves, and the cluster keeps running."""
    DEPOSED = auto()


class Several:
    """One controller. `read` and `prepare` load the cluster file as it is when its term begins."""

    def __init__(
        self,
        cluster: Cluster,
        artifacts: Artifacts,
        make: Make,
        *,
        opened: Callable[[], Store],
        places: Places,
        screen: Screen,
        listener: socket.socket,
        read: Callable[[], Cluster] | None,
        prepare: Callable[[Cluster], Artifacts],
    ) -> None:
        self._cluster = cluster
        self._artifacts = artifacts
        self._make = make
        self._open = opened
        self._screen = screen
        self._listener = listener
        self._read = read
        self._prepare = prepare
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lease")
        self._store: Store | None = None
        host, port = listener.getsockname()[:2]
        url = f"http://{authority(host, port)}"
        holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        leadership = Leadership(self._opened, cluster.name, holder, url, cluster.control.lease_s)
        self._candidate = Candidate(leadership, places.epochs, url, self._note)
        self._term: Term | None = None
        self._parts: Parts | None = None
        self._asked = asyncio.Event()
        """A signal has asked this controller to end."""
        self._leave = asyncio.Event()
        """It ends, and the cluster keeps running."""
        self._hung_up = asyncio.Event()

    async def run(self) -> bool:
        """Follow and lead until this controller is to end; whether the cluster was stopped with it."""
        terminal = has_terminal()

        def hang_up() -> None:
            if terminal and not has_terminal():
                self._stop()
            else:
                self._hung_up.set()

        loop = asyncio.get_running_loop()
        for number, act in ((signal.SIGINT, self._stop), (signal.SIGTERM, self._stop), (signal.SIGHUP, hang_up)):
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, act)
        end = End.LEFT
        try:
            while not self._leave.is_set():
                self._term = term = await self._wait()
                if term is None:
                    break
                end = await self._lead(term)
                if end is not End.DEPOSED:
                    break
                self._screen.line(f"deposed: {term.over}; this controller changes nothing more, and waits", "yellow")
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(RESIGN_S):
                    await self._candidate.resign(self._in_thread)
            self._thread.shutdown(wait=False, cancel_futures=True)
            if self._store is not None:
                self._store.close()
        stopped = end is End.STOPPED
        self._screen.line(
            "stopped; no process is left" if stopped else "this controller has left; the cluster keeps running"
        )
        return stopped

    def _stop(self) -> None:
        self._screen.stop_bars()
        term, parts = self._term, self._parts
        if term is None or parts is None:
            self._leave.set()
        elif not self._asked.is_set():
            self._asked.set()
        elif parts.control.stopping and not term.why_not():
            self._screen.line("stopping at once: running requests are cut off", "red")
            parts.control.kill()
        else:  # it cannot stop anything, or does not know yet whether to
            self._leave.set()

    async def _end(self, parts: Parts, term: Term) -> None:
        """When asked to end, leave the cluster to a follower, or stop it if there is none."""
        await self._asked.wait()
        await term.renew(self._in_thread)
        why_not = term.why_not()
        if why_not:
            self._screen.line(f"the cluster is left as it is: {why_not}", "yellow")
        elif term.waiting:
            self._screen.line("another controller takes over")
        else:
            self._screen.line(
                "There is no other controller, so the cluster stops. Press Ctrl-C again to stop at once."
            )
            parts.control.stop()
            return
        self._leave.set()

    async def _wait(self) -> Term | None:
        """Wait until this controller leads; None: it is to leave."""
        self._parts = None
        parts = self._make(self._cluster, self._artifacts, leading=self._candidate)
        async with self._served(parts):
            return await self._first(self._candidate.elected(self._in_thread))

    async def _lead(self, term: Term) -> End:
        """Lead until this controller is to leave, the cluster is stopped, or it is deposed."""
        self._screen.line(f"this controller is the leader now (epoch {term.epoch})")
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(term.keep(self._in_thread))
            self._asked.clear()
            await self._catch_up()
            self._parts = parts = self._make(self._cluster, self._artifacts, leading=term)
            ending = tasks.create_task(self._end(parts, term))
            async with self._served(parts):
                await self._first(self._controlled(parts), keeping)
            ending.cancel()
            self._parts = self._term = None
            keeping.cancel()
        if parts.control.is_over:
            return End.STOPPED
        return End.DEPOSED if term.over else End.LEFT

    async def _controlled(self, parts: Parts) -> None:
        while True:
            try:
                await parts.deployments.begin(parts.plan)
            except StoreError as error:
                self._note("store_trouble", f"the deployed revisions are not known yet: {error}")
                await asyncio.sleep(AGAIN_S)
            else:
                break
        async with asyncio.TaskGroup() as tasks:
            reloading = tasks.create_task(reload_on(self._hung_up, parts.reload))
            showing = tasks.create_task(show(parts, self._screen, wall_s(), self._listener.getsockname()))
            await parts.control.run()
            showing.cancel()
            reloading.cancel()

    async def _catch_up(self) -> None:
        """Load the current cluster file: the previous leader may have applied changes to it."""
        if self._read is None:
            return
        try:
            cluster = await asyncio.to_thread(self._read)
            found = changes(self._cluster, cluster)
            fixed = [str(change) for change in found if needs_restart(change)]
            if fixed:
                raise UserError("; ".join(f"{each} needs a restart of all controllers" for each in fixed))
            if found:
                self._artifacts = await asyncio.to_thread(self._prepare, cluster)
                self._cluster = cluster
        except UserError as error:
            self._note("not_reloaded", f"{error}\nThe previous settings stay in effect.")

    async def _first(self, work: Coroutine[Any, Any, T], *others: "asyncio.Task[None]") -> T | None:
        """Run `work` until it or one of the others is done, or this controller is to leave; None: unfinished."""
        async with asyncio.TaskGroup() as tasks:
            working, leaving = tasks.create_task(work), tasks.create_task(self._left())
            await asyncio.wait({working, leaving, *others}, return_when=asyncio.FIRST_COMPLETED)
            found = working.result() if working.done() else None
            leaving.cancel()
            working.cancel()
        return found

    async def _left(self) -> None:
        await self._leave.wait()

    @asynccontextmanager
    async def _served(self, parts: Parts) -> AsyncIterator[None]:
        """Serve the admin API of these components, and close them at the end. Connections made in between wait."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(parts.server.run_on(self._listener.dup()))
                yield
                parts.server.stop()
        finally:
            await parts.close()

    def _opened(self) -> Store:
        if self._store is None:
            self._store = self._open()
        return self._store

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run in a dedicated thread: other store operations must not delay the lease."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _note(self, kind: str, why: str) -> None:
        parts = self._parts
        if parts is not None:
            parts.journal.note(kind, why)
        else:
            self._screen.line(why)
