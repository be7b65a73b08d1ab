"""The admin API over parts that a test chooses: a caller of any role, its own registry, scripted reloads."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests.control.fakes.provider import MemoryProvider

from forebay.control.api.access import Credentials
from forebay.control.api.services import Catalogue, Services
from forebay.control.changes import Reloaded
from forebay.control.journal import Journal
from forebay.control.keyring import KeyRing
from forebay.control.loop import Controller
from forebay.control.plan import Places, Plan
from forebay.control.probe import Prober
from forebay.control.snapshot import SnapshotFile
from forebay.core.cluster import Cluster
from forebay.core.model import Task
from forebay.core.reconcile import Rules
from forebay.core.registry.approval import ApprovalRules, Role
from forebay.core.tenancy.roles import Caller
from forebay.obs.metrics import Metrics
from forebay.registry.catalogue import Actor, Description, Listed, Registry, staging
from forebay.registry.signing import own_signer
from forebay.registry.uploads.staging import Staging
from forebay.registry.vault import Vault
from forebay.store.database import Store, open_store
from forebay.wire.admin_request import AddRequest

MODELS = [{"name": "chat", "task": "chat", "source": "x", "engine": "synthetic"}]


def quiet(stage: str, done: int, total: int | None) -> None:
    """Progress of which nobody is told."""


ADA = Caller("ada", Role.ADMIN)
NO_RULES = ApprovalRules()


class ApiRig(Protocol):
    """The parts of a rig that the API needs."""

    control: Controller
    journal: Journal
    metrics: Metrics


@dataclass
class FixedCaller:
    """Admits every request as one caller."""

    caller: Caller = ADA

    def admit(self, credentials: Credentials) -> Caller:
        return self.caller


@dataclass
class FakeReloader:
    """Returns `results` in order, and records the calls."""

    results: list[Reloaded] = field(default_factory=list)
    asked: list[tuple[str, ...]] = field(default_factory=list)
    cluster: Cluster = field(default_factory=lambda: Cluster.model_validate({"models": MODELS}))

    async def __call__(self, by: str = "") -> Reloaded:
        self.asked.append(("reload", by))
        return self.results.pop(0) if self.results else Reloaded()

    async def apply(self, document: str, caller: Caller, *, dry_run: bool) -> Reloaded:
        self.asked.append(("apply", document, caller.name, str(dry_run)))
        return self.results.pop(0) if self.results else Reloaded()


def catalogue(folder: Path, rules: ApprovalRules = NO_RULES) -> Catalogue:
    """A registry below a folder."""

    def store() -> Store:
        return open_store(f"sqlite:///{folder / 'forebay.db'}")

    @contextmanager
    def registry() -> Iterator[Registry]:
        files = folder / "registry"
        with closing(store()) as opened:
            yield Registry(
                opened, files, own_signer(folder / "registry.key"), rules, vault=Vault(files, None, folder / "memory")
            )

    def add(opened: Registry, model: str, asked: AddRequest, by: Actor) -> Listed:
        what = Description(model, asked.source, Task.CHAT, "synthetic", asked.settings, asked.metadata)
        return opened.add(what, Path(asked.source), by, quiet)

    def staged() -> Staging:
        files = folder / "registry"
        return staging(files, Vault(files, None, folder / "memory"), encrypts=False)

    return Catalogue(lambda: closing(store()), registry, add, staged, quiet)


def services(rig: ApiRig, folder: Path, results: list[Reloaded] | None = None) -> Services:
    """The parts over a rig, for an admin."""
    ring = KeyRing(("team-a", "ops"), folder / "keys.json", folder / "admin-keys.json")
    changes = FakeReloader(results or [])
    return Services(
        rig.control, rig.journal, rig.metrics, changes, catalogue(folder), FixedCaller(), keys=lambda: ring
    )


class UnobservingController(Controller):
    """Its observations end at once, without a result."""

    async def look(self) -> None:
        return None


@dataclass
class IdleControl:
    """A control that is not started."""

    folder: Path

    def __post_init__(self) -> None:
        places = Places(self.folder)
        self.journal, self.metrics = Journal(places.log, lambda event: None), Metrics()
        self.control = UnobservingController(
            Plan("test", "http://127.0.0.1:8080", (), ()),
            MemoryProvider(),
            Prober(places.peers),
            snapshot=SnapshotFile(places.snapshot),
            journal=self.journal,
            metrics=self.metrics,
            rules=Rules(),
        )
