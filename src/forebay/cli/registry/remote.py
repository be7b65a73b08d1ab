"""The registry of a running cluster, through its admin API, as far as the commands need it."""

from urllib.parse import quote

import msgspec

from forebay.cli.deploy.client import Admin
from forebay.cli.registry.uploading import send
from forebay.cli.registry.work import Registration
from forebay.cli.settings import WRONG_USAGE, UserError
from forebay.control.api.documents import Collected, History, Revisions, Verified
from forebay.core.registry.approval import Step
from forebay.registry.catalogue import Actor, Listed
from forebay.registry.signing import Proof
from forebay.registry.sources import FILE, PathSource, Progress, parse
from forebay.store.events import Event
from forebay.wire.clusterfile import ClusterFileError, parse_value

PATH = "/v1/registry"
ENGINE = "engine."


class RemoteRegistry:
    """The same as `Registry`, but the actor is the holder of the key sent. Every method raises `UserError`."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    def add(self, registration: Registration, progress: Progress) -> Listed:
        """Register a model. A local path is uploaded; everything else is fetched by the cluster, including
        `file:///PATH`, which is a path on its machine."""
        source = parse(registration.source)
        description = {
            "task": registration.task,
            "engine": registration.engine,
            "settings": dict(_setting(each) for each in registration.settings),
            "metadata": registration.metadata,
        }
        path = _path(registration.model)
        if not isinstance(source, PathSource):
            return self._admin.send("POST", path, Listed, {"source": registration.source, **description})
        if registration.source.startswith(FILE):
            return self._admin.send("POST", path, Listed, {"source": str(source.path), **description})
        sent = send(self._admin, source.path, progress)
        progress("registering", 0, None)
        return self._admin.send("POST", path, Listed, {"upload": sent, **description})

    def revisions(self, model: str | None = None) -> tuple[Listed, ...]:
        """All revisions, of one model or of all."""
        return self._admin.get(_path(model) if model else PATH, Revisions).revisions

    def show(self, model: str, name: str) -> Listed:
        """A revision, by its id or by an alias."""
        return self._admin.get(_path(model, name), Listed)

    def step(self, model: str, name: str, step: Step, by: Actor, reason: str = "") -> Listed:
        """Approve, reject or resubmit a revision."""
        return self._admin.send("POST", _path(model, name, step.value), Listed, {"why": reason})

    def set_alias(self, model: str, alias: str, name: str, by: Actor) -> Listed:
        """Point an alias at a revision."""
        return self._admin.send("PUT", _path(model, "aliases", alias), Listed, {"revision": name})

    def sign(self, model: str, name: str, proof: Proof, by: Actor) -> Listed:
        """Add a publisher's signature."""
        return self._admin.send("POST", _path(model, name, "signatures"), Listed, proof._asdict())

    def attach(self, model: str, name: str, bundle: bytes) -> Listed:
        """Add the signatures of a `model.sig`."""
        body = {"bundle": msgspec.Raw(bundle)}
        return self._admin.send("POST", _path(model, name, "signatures"), Listed, body)

    def verify(self, progress: Progress, model: str | None = None) -> tuple[str, ...]:
        """Everything that was modified."""
        return self._admin.send("POST", "/v1/verify", Verified, {"model": model}).wrong

    def sweep(self) -> int:
        """Remove unreferenced files; returns the number of bytes freed."""
        return self._admin.send("POST", "/v1/gc", Collected, None).freed_bytes

    def history(self, subject: str | None, last: int) -> tuple[Event, ...]:
        """The newest events, oldest first."""
        query = {"subject": subject} if subject else {}
        return self._admin.get("/v1/history", History, last=last, **query).events


def _path(*parts: str) -> str:
    return "/".join([PATH, *(quote(part, safe="") for part in parts)])


def _setting(text: str) -> tuple[str, object]:
    """`engine.threads=2` as a name and a value: a remote cluster accepts engine settings only."""
    path, equals, value = text.partition("=")
    if not equals or not path.startswith(ENGINE):
        raise UserError(f"--set {text!r}: expected engine.NAME=VALUE.", WRONG_USAGE)
    try:
        return path.removeprefix(ENGINE), parse_value(value)
    except ClusterFileError:
        raise UserError(f"--set {text!r}: the value is not valid YAML.", WRONG_USAGE) from None
