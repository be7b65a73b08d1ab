"""What the gateway learns by polling: the snapshot file, the replicas' load reports."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
import structlog

from forebay.core.errors import Code, Refusal
from forebay.core.model import GatewaySpec, LoadReport, ModelRoutes, Replica, Snapshot, Task
from forebay.gateway.asking import COUNTING
from forebay.gateway.fleet import Served
from forebay.gateway.gateway import Gateway
from forebay.gateway.link import Link
from forebay.net.client import Pool
from forebay.net.fetching import NoAnswer, fetch
from forebay.net.outbox import Outbox
from forebay.net.replica_protocol import UNIT
from forebay.wire.documents import UNREADABLE

LOAD: Final = b"/load"
REPORT_BYTES_MAX: Final = 256 * 1024
"""Twice what a load report with the maximum number of blocks takes."""


class Fleet:
    """Keeps the gateway's replicas in line with the snapshot, and polls each one's load, in tasks of `group`."""

    def __init__(
        self,
        gateway: Gateway,
        spec: GatewaySpec,
        group: asyncio.TaskGroup,
        log: structlog.stdlib.BoundLogger,
        outbox: Outbox | None = None,
    ) -> None:
        self._gateway = gateway
        self._spec = spec
        self._group = group
        self._log = log
        self._seen: tuple[int, int, int] | None = None
        self._complaint = ""
        self._watching: set[asyncio.Task[None]] = set()
        self.outbox = outbox or Outbox(asyncio.get_running_loop())
        """Upstream writes are flushed together with writes to clients, once per iteration of the loop."""
        gateway.scheduler.reload = self.look

    def look(self) -> None:
        """Load the snapshot if it has changed; a missing or invalid one changes nothing."""
        path, complaint = self._spec.snapshot_path, ""  # a plain string, not a Path: this runs very often
        try:
            stat = os.stat(path)
            seen = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if seen == self._seen:
                return
            snapshot = msgspec.json.decode(Path(path).read_bytes(), type=Snapshot)
        except FileNotFoundError:
            complaint = "missing"
        except (OSError, *UNREADABLE) as error:
            complaint = str(error)
        else:
            current = self._gateway.snapshot
            self._seen, known = seen, current.epoch if current is not None else 0
            if snapshot.epoch < known:
                complaint = f"its epoch {snapshot.epoch} is older than the known epoch {known}"
            else:
                self._apply(snapshot)
        if complaint and complaint != self._complaint:
            self._log.warning("snapshot unusable, keeping the last one", path=path, problem=complaint)
        self._complaint = complaint

    def close(self) -> None:
        """Close the connections to all replicas; attempts in flight fail."""
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
                if gone.waiting.band(relay) is None:  # it has expired meanwhile: a fallback model may serve it
                    continue
                relay.refuse(Refusal(Code.MODEL_NOT_FOUND, f"The model `{name}` was removed.", "model"))
            scheduler = gateway.scheduler
            scheduler.removed = [each for each in (*scheduler.removed, gone) if each.in_flight]
        for routes in snapshot.models:
            served = gateway.served.get(routes.name)
            if served is None:
                served = gateway.served[routes.name] = Served(routes, gateway.account(routes.name))
            served.update(routes)
            self._relink(served, routes)
            gateway.scheduler.pump(served)
        gateway.dispatcher.take_over(snapshot)
        if snapshot.tenants is not None and gateway.access is not None:
            gateway.access.configure(snapshot.tenants)
        self._log.info("snapshot loaded", version=snapshot.version, models=len(snapshot.models))

    def _relink(self, served: Served, routes: ModelRoutes) -> None:
        known = {(link.id, link.generation, link.host, link.port): link for link in served.links}
        links = []
        for replica in sorted(routes.replicas, key=lambda r: r.id):
            link = known.pop((replica.id, replica.generation, replica.host, replica.port), None)
            if link is None:
                link = self._link(served, replica)
            else:
                link.plan(replica.state)
                link.meter.weigh(replica.weight)
            links.append(link)
        served.links = links
        for gone in known.values():
            served.unlink(gone)

    def _link(self, served: Served, replica: Replica) -> Link:
        identity = b"%b: %b.%d\r\n" % (UNIT, replica.id.encode(), replica.generation)
        pool = Pool(replica.host, replica.port, self._group, greeting=identity, outbox=self.outbox)
        link = served.link(replica, pool)
        task = self._group.create_task(self._watch(link, served))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)
        return link

    def _replace(self, link: Link, served: Served) -> None:
        """Another process answers under its identity: attempts in flight at the old process may be retried at this
        one."""
        self._log.warning("replica process was replaced", replica=link.id, generation=link.generation)
        served.mark_unreachable(link)
        _lose(link)
        if link in served.links:
            own = next(replica for replica in served.routes.replicas if replica.id == link.id)
            served.links[served.links.index(link)] = self._link(served, own)
            served.unlink(link)

    async def _watch(self, link: Link, served: Served) -> None:
        """Poll a replica's load for as long as it is in the snapshot or has attempts in flight."""
        pool = Pool(link.host, link.port, self._group, connect_timeout_s=self._spec.replica_timeout_s, idle_max=1)
        try:
            await self._poll(link, served, pool)
        finally:
            pool.close()

    async def _poll(self, link: Link, served: Served, pool: Pool) -> None:
        spec, now = self._spec, self._gateway.now
        heard_at, lost, complaint = now(), False, ""
        while not link.retired or link.attempts:
            own, asked_at = len(link.attempts), now()
            patience_s = spec.replica_timeout_s - (0.0 if lost else asked_at - heard_at)
            target = _target(link, served)
            body = await fetch(pool, target, max(patience_s, spec.load_poll_s), REPORT_BYTES_MAX)
            report = _report(body)
            problem = ""
            if report is not None and link.replaced(report):
                self._replace(link, served)
                return
            if report is not None:
                problem = served.apply_report(link, report, own, asked_at, now())
                if not problem:
                    heard_at = now()
                lost = now() - heard_at >= spec.replica_timeout_s  # another identity is no sign of life
                if report.blocks is not None and not problem:
                    self._doubts(link, served.apply_blocks(link, report.blocks, now()))
            else:
                answered = not isinstance(body, NoAnswer) or body.too_large
                if answered and target != LOAD:  # without the blocks the report may be readable
                    served.doubt_blocks(link)
                    self._doubts(link, "unreadable")
                served.mark_unreachable(link)
                lost = now() - heard_at >= spec.replica_timeout_s
            if lost:
                problem = f"no load report for {spec.replica_timeout_s:g} s"
                _lose(link)
            if problem and problem != complaint:
                self._log.warning("replica unusable", replica=link.id, generation=link.generation, problem=problem)
            complaint = problem
            link.pool.sweep(now())
            self._gateway.scheduler.pump(served)
            await asyncio.sleep(spec.load_poll_s)

    def _doubts(self, link: Link, problem: str) -> None:
        if problem:
            self._log.warning("prefix cache report ignored", replica=link.id, problem=problem)


def _lose(link: Link) -> None:
    """Fail all attempts in flight there."""
    for relay in list(link.attempts):
        if relay in link.attempts:  # ending one may end another
            relay.replica_lost()


def _target(link: Link, served: Served) -> bytes:
    """Path to poll: the load, and the prefix cache changes where routing uses prompts."""
    routes, seq = served.routes, link.blocks_seq
    if seq is None or routes.task is not Task.CHAT or routes.policy in COUNTING:
        return LOAD
    return b"%b?blocks_since=%d" % (LOAD, seq)


def _report(body: bytes | NoAnswer) -> LoadReport | None:
    try:
        return None if isinstance(body, NoAnswer) else msgspec.json.decode(body, type=LoadReport)
    except UNREADABLE:
        return None
