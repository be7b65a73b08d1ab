"""What the gateway learns by asking again and again: the snapshot file, the replicas' load reports."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
import structlog

from forebay.core.errors import Code, Refusal
from forebay.core.model import GatewaySpec, LoadReport, ModelRoutes, Snapshot, Task
from forebay.gateway.fleet import Link, Served
from forebay.gateway.gateway import COUNTING, Gateway
from forebay.net.client import CallError, Header, Pool
from forebay.wire import http1
from forebay.wire.documents import UNREADABLE

SNAPSHOT_POLL_S: Final = 0.1
LOAD: Final = b"/load"
ANSWER_BYTES_MAX: Final = 8 * 1024 * 1024
REPORT_BYTES_MAX: Final = 256 * 1024
"""Twice what the most blocks that a load report may name need."""


class _Answer:
    """A sink that makes a future of a whole answer."""

    def __init__(self, future: "asyncio.Future[bytes | None]", bytes_max: int) -> None:
        self.future = future
        self.ended = False
        self._bytes_max = bytes_max
        self._status = 0
        self._body = b""

    def on_head(self, status: int, headers: list[Header]) -> None:
        self._status = status

    def on_body(self, data: bytes) -> None:
        if len(self._body) + len(data) <= self._bytes_max:
            self._body += data
        elif not self.future.done():
            self.future.set_result(b"" if self._status == 200 else None)

    def on_end(self, trailers: list[Header]) -> None:
        self.ended = True
        if not self.future.done():
            self.future.set_result(self._body if self._status == 200 else None)

    def on_error(self, error: CallError) -> None:
        self.ended = True
        if not self.future.done():
            self.future.set_result(None)


async def fetch(pool: Pool, target: bytes, timeout_s: float, bytes_max: int = ANSWER_BYTES_MAX) -> bytes | None:
    """GET a small document; None if there is no good answer in time, nothing of one that is too large."""
    answer = _Answer(asyncio.get_running_loop().create_future(), bytes_max)
    call = pool.call(http1.request(b"GET", target, [(b"host", b"forebay")]), answer)
    try:
        async with asyncio.timeout(timeout_s):
            return await answer.future
    except TimeoutError:
        return None
    finally:
        if not answer.ended:
            call.cancel()


class Fleet:
    """Keeps the gateway's replicas like the snapshot says, and each one's load fresh, in tasks of `group`."""

    def __init__(
        self, gateway: Gateway, spec: GatewaySpec, group: asyncio.TaskGroup, log: structlog.stdlib.BoundLogger
    ) -> None:
        self._gateway = gateway
        self._spec = spec
        self._group = group
        self._log = log
        self._seen: tuple[int, int, int] | None = None
        self._complaint = ""
        self._watching: set[asyncio.Task[None]] = set()

    async def follow(self) -> None:
        """Take over every new snapshot; a missing or broken one changes nothing."""
        while True:
            self.look()
            await asyncio.sleep(SNAPSHOT_POLL_S)

    def look(self) -> None:
        """Read the snapshot file if it is another one than last time."""
        path = Path(self._spec.snapshot_path)
        complaint = ""
        try:
            stat = os.stat(path)
            seen = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if seen == self._seen:
                return
            snapshot = msgspec.json.decode(path.read_bytes(), type=Snapshot)
        except FileNotFoundError:
            complaint = "missing"
        except (OSError, *UNREADABLE) as error:
            complaint = str(error)
        else:
            self._seen = seen
            self._apply(snapshot)
        if complaint and complaint != self._complaint:
            self._log.warning("snapshot unreadable, going on with the last one", path=str(path), problem=complaint)
        self._complaint = complaint

    def close(self) -> None:
        """Let go of every replica; attempts under way fail."""
        for task in list(self._watching):
            task.cancel()
        for served in self._gateway.served.values():
            for link in served.links:
                link.retire()
                link.pool.close()

    def _apply(self, snapshot: Snapshot) -> None:
        gateway = self._gateway
        gateway.snapshot = snapshot
        names = {routes.name for routes in snapshot.models}
        for name in [name for name in gateway.served if name not in names]:
            gone = gateway.served.pop(name)
            self._relink(gone, replace(gone.routes, replicas=()))
            for relay in gone.waiting.waiting():
                relay.refuse(Refusal(Code.MODEL_NOT_FOUND, f"The model `{name}` was removed.", "model"))
        for routes in snapshot.models:
            served = gateway.served.get(routes.name)
            if served is None:
                served = gateway.served[routes.name] = Served(routes, gateway.account(routes.name))
            served.update(routes)
            self._relink(served, routes)
            gateway.pump(served)
        gateway.dispatcher.take_over(snapshot)
        self._log.info("snapshot taken over", version=snapshot.version, models=len(snapshot.models))

    def _relink(self, served: Served, routes: ModelRoutes) -> None:
        known = {(link.id, link.generation, link.host, link.port): link for link in served.links}
        links = []
        for replica in sorted(routes.replicas, key=lambda r: r.id):
            link = known.pop((replica.id, replica.generation, replica.host, replica.port), None)
            if link is None:
                link = served.link(replica, Pool(replica.host, replica.port, self._group))
                task = self._group.create_task(self._watch(link, served))
                self._watching.add(task)
                task.add_done_callback(self._watching.discard)
            else:
                link.plan(replica.state)
            links.append(link)
        served.links = links
        for gone in known.values():
            served.unlink(gone)

    async def _watch(self, link: Link, served: Served) -> None:
        """Ask a replica for its load, for as long as it is wanted or has attempts under way."""
        pool = Pool(link.host, link.port, self._group, connect_timeout_s=self._spec.replica_timeout_s, idle_max=1)
        try:
            await self._poll(link, served, pool)
        finally:
            pool.close()

    async def _poll(self, link: Link, served: Served, pool: Pool) -> None:
        spec, now = self._spec, self._gateway.now
        heard_at, lost, complaint = now(), False, ""
        while not link.retired or link.attempts:
            own = len(link.attempts)
            patience_s = spec.replica_timeout_s - (0.0 if lost else now() - heard_at)
            target = _target(link, served)
            body = await fetch(pool, target, max(patience_s, spec.load_poll_s), REPORT_BYTES_MAX)
            report = _report(body)
            problem = ""
            if report is not None:
                problem = served.heard(link, report, own, now())
                if not problem:
                    heard_at = now()
                lost = now() - heard_at >= spec.replica_timeout_s  # another one at its address is no sign of it
                if report.blocks is not None and not problem:
                    self._doubts(link, served.heard_blocks(link, report.blocks, now()))
            else:
                if body is not None and target != LOAD:  # without the blocks it may make sense
                    served.doubt_blocks(link)
                    self._doubts(link, "it cannot be read")
                served.unheard(link)
                lost = now() - heard_at >= spec.replica_timeout_s
            if lost:
                problem = f"no load report for {spec.replica_timeout_s:g} s"
                for relay in list(link.attempts):
                    if relay in link.attempts:  # the end of one may end another
                        relay.replica_lost()
            if problem and problem != complaint:
                self._log.warning("replica unusable", replica=link.id, generation=link.generation, problem=problem)
            complaint = problem
            link.pool.sweep(now())
            self._gateway.pump(served)
            await asyncio.sleep(spec.load_poll_s)

    def _doubts(self, link: Link, problem: str) -> None:
        if problem:
            self._log.warning("prefix cache report ignored", replica=link.id, problem=problem)


def _target(link: Link, served: Served) -> bytes:
    """What to ask a replica for: its load, and where routing looks at prompts, what its prefix cache holds."""
    routes, seq = served.routes, link.blocks_seq
    if seq is None or routes.task is not Task.CHAT or routes.policy in COUNTING:
        return LOAD
    return b"%b?blocks_since=%d" % (LOAD, seq)


def _report(body: bytes | None) -> LoadReport | None:
    try:
        return None if body is None else msgspec.json.decode(body, type=LoadReport)
    except UNREADABLE:
        return None
