"""The services behind the admin API, and the threads for blocking work."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeVar

from starlette.requests import Request

from forebay.control.api.access import Authenticator
from forebay.control.api.recorded import Records
from forebay.control.changes import Reloaded
from forebay.control.deploying import Deployments
from forebay.control.journal import Journal
from forebay.control.keyring import KeyRing
from forebay.control.loop import Controller
from forebay.control.standby.sla import Delivered
from forebay.core.cluster import Cluster
from forebay.core.errors import Code, Refusal
from forebay.core.tenancy.roles import Caller
from forebay.obs.metrics import Metrics
from forebay.registry.catalogue import Actor, Listed, Registry
from forebay.registry.sources import Progress
from forebay.registry.uploads.staging import Staging
from forebay.store.access import RunBlocking
from forebay.store.database import Store
from forebay.wire.admin_request import NAME_CHARS_MAX, AddRequest

T = TypeVar("T")
THREADS: Final = 4
WAITING_MAX: Final = 16
"""Requests that may queue for a thread."""
READERS: Final = 1
"""Threads that read records: one, so that reading takes only its share of the controller's CPU."""


class Changing(Protocol):
    """Applies cluster files, one after the other."""

    @property
    def cluster(self) -> Cluster:
        """The last one applied."""

    async def __call__(self, by: str = "") -> Reloaded:
        """Reload the file."""

    async def apply(self, document: str, caller: Caller, *, dry_run: bool) -> Reloaded:
        """Apply this document, or only report what it would change. Raises `Refusal` if the caller may not."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The history and the registry. Everything blocks, and raises `StoreError`, `RegistryError`, `SourceError`."""

    store: Callable[[], AbstractContextManager[Store]]
    registry: Callable[[], AbstractContextManager[Registry]]
    add: Callable[[Registry, str, AddRequest, Actor], Listed]
    """Fetches and registers a model. May raise `Refusal`, too."""
    staging: Callable[[], Staging]
    """Where uploaded files are staged."""
    progress: Progress


class Threads:
    """Runs blocking work in threads of its own, so that client requests cannot exhaust those of the control loop."""

    def __init__(self, threads: int = THREADS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="admin")
        self._room = threads + WAITING_MAX
        self._under_way = 0

    async def __call__(self, work: Callable[[], T]) -> T:
        """The result of `work`. Raises `Refusal` if too many requests are queued."""
        if self._under_way >= self._room:
            raise Refusal(Code.OVERLOADED, "The admin API is busy; try again later.")
        self._under_way += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._under_way -= 1


@dataclass(frozen=True, slots=True)
class Services:
    """The services behind the admin API."""

    control: Controller
    journal: Journal
    metrics: Metrics
    changing: Changing
    catalogue: Catalogue
    authenticator: Authenticator
    threads: RunBlocking = field(default_factory=Threads)
    delivered: Delivered | None = None
    """Reads the gateways' records of requests; None: there are none."""
    keys: Callable[[], KeyRing] | None = None
    """The API keys, in the files named by the current cluster file; None: there are none."""
    records: Records | None = None
    """Reads the gateways' records of single requests; None: there are none."""
    reading: RunBlocking = field(default_factory=lambda: Threads(READERS))
    """Runs the reading of records."""


class AdminCall(NamedTuple):
    """An authorised request."""

    services: Services
    request: Request
    caller: Caller
    body: bytes

    @property
    def deployments(self) -> Deployments:
        """The deployments. Raises `Refusal`."""
        found = self.services.control.deployments
        if found is None:
            raise Refusal(Code.CONFLICT, "This cluster does not support rollouts.")
        return found

    @property
    def actor(self) -> Actor:
        """The caller, as an actor of the registry."""
        return Actor(self.caller.name, self.caller.role)

    def named(self, name: str) -> str:
        """A path parameter. Raises `Refusal` if it cannot be a name."""
        found = str(self.request.path_params[name])
        if not found.isprintable() or len(found) > NAME_CHARS_MAX:
            raise Refusal(Code.NOT_FOUND, f"There is no such {name}.", name)
        return found


Handler = Callable[[AdminCall], Awaitable[object]]
"""Returns a value to be sent as JSON, or a `Response`. Raises `Refusal`, and the errors that `app` translates."""
