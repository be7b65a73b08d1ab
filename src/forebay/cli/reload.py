"""Taking a changed cluster file over while the cluster runs: read, compare, prepare, and only then change things."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.cli.settings import UserError
from forebay.control.changes import NEED_RESTART, Reloaded, changes, effects
from forebay.control.journal import Journal
from forebay.control.leasing import make_leases
from forebay.control.loop import Controller
from forebay.control.plan import Plan
from forebay.core.cluster import Cluster

NO_FILE = "there is no file to read again: the cluster was started without one"
UNCHANGED = "Nothing was changed."


@dataclass
class Reloader:
    """Does one reload after the other. `read` and `make_plan` raise `UserError` with all that is wrong.

    `make_plan` fetches and converts models, which may take long; it gets a thread of its own.
    """

    control: Controller
    journal: Journal
    cluster: Cluster
    plan: Plan
    read: Callable[[], Cluster] | None
    make_plan: Callable[[Cluster], Plan]
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __call__(self) -> Reloaded:
        """Read the file again and take it over, or say what is wrong with it and change nothing."""
        async with self._turn:
            try:
                done = await self._reload()
            except UserError as error:
                done = Reloaded(tuple(str(error).splitlines()))
            except Exception as mistake:  # supervisor: a file that we stumble over must not end what runs
                done = Reloaded((f"nothing was changed: {type(mistake).__name__}: {mistake}",))
        if done.problems:
            self.journal.note("not_reloaded", "\n".join(done.problems))
        else:
            self.journal.note("reloaded", "\n".join(summary(done)))
        return done

    async def _reload(self) -> Reloaded:
        if self.read is None:
            raise UserError(NO_FILE)
        cluster = await asyncio.to_thread(self.read)
        found = changes(self.cluster, cluster)
        fixed = [change for change in found if change.path in NEED_RESTART]
        if fixed:
            raise UserError("\n".join([*(f"{change} needs a restart of forebay up" for change in fixed), UNCHANGED]))
        plan = await asyncio.to_thread(self.make_plan, cluster)
        if self.control.stopping:
            raise UserError("the cluster stops")
        done = Reloaded((), found, effects(self.plan, plan))
        self.control.take_over(plan, make_leases(plan))
        self.cluster, self.plan = cluster, plan
        await self.control.look()
        return done


def summary(done: Reloaded) -> list[str]:
    """What people are told of a reload that went well, line by line."""
    if not done.changes and not done.effects:
        return ["nothing has changed"]
    return [*map(str, done.changes), *done.effects]
