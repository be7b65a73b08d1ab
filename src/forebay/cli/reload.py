"""Applies a changed cluster file to the running cluster: read, compare and prepare it, and only then change anything.

The file is the one that the cluster was started with (`forebay reload`), or one sent over the API (`forebay apply`).
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from forebay.cli.settings import UserError
from forebay.control.changes import Change, Reloaded, changes, effects, needs_restart
from forebay.control.journal import Journal
from forebay.control.leasing import make_leases
from forebay.control.loop import Controller
from forebay.control.plan import Plan
from forebay.core.cluster import Cluster
from forebay.core.errors import Code, Refusal
from forebay.core.tenancy.roles import Caller, changes_refusal
from forebay.obs.clock import wall_s
from forebay.store import events
from forebay.store.database import Store, StoreError

NO_FILE = "there is no file to reload: the cluster was started without one"
NOT_SENT = "this cluster does not accept cluster files over the API"
UNCHANGED = "Nothing was changed."

Recorder = Callable[[str, str, Reloaded], None]
"""Records a change in the history: kind, actor, changes. Blocks. Raises `StoreError`."""


@dataclass
class Reloader:
    """Runs one reload at a time. `read`, `parse` and `make_plan` raise `UserError` with all problems.

    `make_plan` fetches and converts models, which may take long, so it runs in a thread of its own.
    """

    control: Controller
    journal: Journal
    cluster: Cluster
    plan: Plan
    read: Callable[[], Cluster] | None
    make_plan: Callable[[Cluster], Plan]
    parse: Callable[[str], Cluster] | None = None
    """The cluster of a document sent over the API, with the overrides of the start applied."""
    record: Recorder | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __call__(self, by: str = "") -> Reloaded:
        """Read the file again and apply it, or report its problems and change nothing."""
        done = await self._tried(self.read, by, None)
        if done.problems:
            self.journal.note("not_reloaded", "\n".join(done.problems))
        else:
            self.journal.note("reloaded", "\n".join(summary(done)))
        return done

    async def apply(self, document: str, caller: Caller, *, dry_run: bool) -> Reloaded:
        """Apply a document; with `dry_run` do everything except for the change itself.

        Raises `Refusal` if the caller may not, `StoreError` if the change cannot be recorded.
        """
        parse = self.parse
        done = await self._tried(parse and (lambda: parse(document)), caller.name, caller, dry_run)
        if not dry_run and not done.problems:
            self.journal.note("applied", "\n".join([f"by {caller.name}", *summary(done)]))
        return done

    async def _tried(
        self, read: Callable[[], Cluster] | None, by: str, caller: Caller | None, dry_run: bool = False
    ) -> Reloaded:
        async with self._turn:
            try:
                return await self._apply(read, by, caller, dry_run)
            except UserError as error:
                return Reloaded(tuple(str(error).splitlines()))
            except (Refusal, StoreError):
                raise
            except Exception as mistake:  # supervisor: a bug triggered by a file must not stop the running cluster
                return Reloaded((f"nothing was changed: {type(mistake).__name__}: {mistake}",))

    async def _apply(
        self, read: Callable[[], Cluster] | None, by: str, caller: Caller | None, dry_run: bool
    ) -> Reloaded:
        if read is None:
            raise UserError(NO_FILE if caller is None else NOT_SENT)
        cluster = await asyncio.to_thread(read)
        found = changes(self.cluster, cluster)
        fixed = [change for change in found if needs_restart(change)]
        if fixed:
            raise UserError("\n".join([*(f"{change} needs a restart of forebay up" for change in fixed), UNCHANGED]))
        if caller is not None:
            self._permit(caller, cluster, found)
        plan = await asyncio.to_thread(self.make_plan, cluster)
        if self.control.stopping:
            raise UserError("the cluster is stopping")
        deployments = self.control.deployments
        wrong = deployments.problems(plan) if deployments else ()
        if wrong:
            raise UserError("\n".join([*wrong, UNCHANGED]))
        done = Reloaded((), found, effects(self.plan, plan))
        if dry_run:
            return done
        if self.record and (done.changes or done.effects):
            await self._write_down(self.record, by, caller, done)
        if deployments:
            try:
                await deployments.take_over(plan)
            except StoreError as error:
                raise UserError(f"{error}\n{UNCHANGED}") from error
        self.control.take_over(plan, make_leases(plan))
        self.cluster, self.plan = cluster, plan
        await self.control.look()
        return done

    def _permit(self, caller: Caller, cluster: Cluster, found: tuple[Change, ...]) -> None:
        before = {model.name: model.source for model in self.cluster.models}
        sources = [model.source for model in cluster.models if before.get(model.name) != model.source]
        rules = self.cluster.registry
        strict = rules.approvals_min > 0 or bool(rules.publishers)
        why_not = changes_refusal([change.path for change in found], sources, strict, caller)
        if why_not:
            raise Refusal(Code.ROLE_NOT_ALLOWED, f"{why_not}. {UNCHANGED}", "document")

    async def _write_down(self, record: Recorder, by: str, caller: Caller | None, done: Reloaded) -> None:
        """Before the change. The owner of the file can change things even while the store is down."""
        try:
            await asyncio.to_thread(record, "cluster.applied" if caller else "cluster.reloaded", by, done)
        except StoreError as error:
            if caller is not None:
                raise
            self.journal.note("not_in_history", str(error))


def record(store: Callable[[], AbstractContextManager[Store]], name: str, kind: str, by: str, done: Reloaded) -> None:
    """Record a change in the history of a cluster. Raises `StoreError`."""
    why = "; ".join(map(str, done.changes or done.effects))
    with store() as opened, opened.write() as connection:
        events.append(
            connection,
            at=wall_s(),
            actor=by,
            kind=kind,
            subject=f"cluster/{name}",
            why=why,
            document=done,
            cluster=name,
        )


def summary(done: Reloaded) -> list[str]:
    """The lines to show after a successful reload."""
    if not done.changes and not done.effects:
        return ["nothing has changed"]
    return [*map(str, done.changes), *done.effects]
