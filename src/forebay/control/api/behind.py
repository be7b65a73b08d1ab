"""What the admin API speaks for, and how long work is kept away from the loop."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeVar

from starlette.requests import Request

from forebay.control.api.access import Doorman
from forebay.control.api.recorded import Records
from forebay.control.changes import Reloaded
from forebay.control.deploying import Deployments
from forebay.control.journal import Journal
from forebay.control.keyring import KeyRing
from forebay.control.loop import Controller
from forebay.control.rolling.nouns import Run
from forebay.control.standby.sla import Delivered
from forebay.core.cluster import Cluster
from forebay.core.errors import Code, Refusal
from forebay.core.tenancy.roles import Caller
from forebay.obs.metrics import Metrics
from forebay.registry.catalogue import Actor, Listed, Registry
from forebay.registry.sources import Progress
from forebay.registry.uploads.staging import Staging
from forebay.store.database import Store
from forebay.wire.admin_request import NAME_CHARS_MAX, AddAsked

T = TypeVar("T")
THREADS: Final = 4
WAITING_MAX: Final = 16
"""Requests that wait for one of the threads."""
READERS: Final = 1
"""Threads that read records: one takes no more than its share of what control computes with."""


class Changing(Protocol):
    """Takes cluster files over, one after the other."""

    @property
    def cluster(self) -> Cluster:
        """What was taken over last."""

    async def __call__(self, by: str = "") -> Reloaded:
        """Read the file again."""

    async def apply(self, document: str, caller: Caller, *, dry_run: bool) -> Reloaded:
        """Take this one over, or only say what it would change. Raises `Refusal` if the caller may not."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The history and the registry. All of it blocks, and raises `StoreError`, `RegistryError`, `SourceError`."""

    store: Callable[[], AbstractContextManager[Store]]
    registry: Callable[[], AbstractContextManager[Registry]]
    add: Callable[[Registry, str, AddAsked, Actor], Listed]
    """Fetches and registers a model. Raises `Refusal` too."""
    staging: Callable[[], Staging]
    """Where what clients send is kept."""
    progress: Progress


class Threads:
    """Runs what blocks in a few threads of its own: whatever clients ask for, control has the loop's."""

    def __init__(self, threads: int = THREADS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="admin")
        self._room = threads + WAITING_MAX
        self._under_way = 0

    async def __call__(self, work: Callable[[], T]) -> T:
        """What `work` returns. Raises `Refusal` if too much waits already."""
        if self._under_way >= self._room:
            raise Refusal(Code.OVERLOADED, "The admin API is busy; try again later.")
        self._under_way += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._under_way -= 1


@dataclass(frozen=True, slots=True)
class Behind:
    """The parts that answer."""

    control: Controller
    journal: Journal
    metrics: Metrics
    changing: Changing
    catalogue: Catalogue
    doorman: Doorman
    threads: Run = field(default_factory=Threads)
    delivered: Delivered | None = None
    """What gateways have written down of requests; None: nobody can tell."""
    keys: Callable[[], KeyRing] | None = None
    """API keys, as the cluster file now says where; None: there are none."""
    records: Records | None = None
    """What gateways have written down of each request; None: there is nothing."""
    reading: Run = field(default_factory=lambda: Threads(READERS))
    """Runs what reads them."""


class Asked(NamedTuple):
    """A request that may be answered."""

    behind: Behind
    request: Request
    caller: Caller
    body: bytes

    @property
    def deployments(self) -> Deployments:
        """What rolls out. Raises `Refusal`."""
        found = self.behind.control.deployments
        if found is None:
            raise Refusal(Code.CONFLICT, "This cluster cannot roll anything out.")
        return found

    @property
    def actor(self) -> Actor:
        """Who asks, as the registry wants to know it."""
        return Actor(self.caller.name, self.caller.role)

    def named(self, name: str) -> str:
        """A part of the path. Raises `Refusal` for what cannot be the name of anything."""
        found = str(self.request.path_params[name])
        if not found.isprintable() or len(found) > NAME_CHARS_MAX:
            raise Refusal(Code.NOT_FOUND, f"There is no such {name}.", name)
        return found


Handler = Callable[[Asked], Awaitable[object]]
"""What is answered: a value that becomes JSON, or a `Response`. Raises `Refusal`, and what `app` translates."""
