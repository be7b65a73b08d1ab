"""The registry and the history behind the admin API: opened for each request, with the current cluster file."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from forebay.cli.registry.opening import registry_of, staging_of, store_of
from forebay.cli.settings import UserError
from forebay.control.api.services import Catalogue
from forebay.core.cluster import Cluster
from forebay.core.errors import Code, Refusal
from forebay.registry.catalogue import Actor, Listed, Registry
from forebay.registry.sources import PathSource, Progress, SourceError, parse
from forebay.wire.admin_request import AddRequest

SENT = "upload:"
"""Prefix of the source of an upload; the client's name for it follows."""


def _is_missing(source: str) -> bool:
    """Whether the source is a path that does not exist."""
    try:
        found = parse(source)
        return isinstance(found, PathSource) and not found.path.exists()
    except (SourceError, OSError):
        return True


def catalogue_of(cluster: Callable[[], Cluster], home: Path, progress: Progress) -> Catalogue:
    """Build the catalogue. `progress` is called during long work, and may raise `UserError` to cancel it."""

    def report(stage: str, done: int, total: int | None) -> None:
        try:
            progress(stage, done, total)
        except UserError as error:
            raise Refusal(Code.DRAINING, f"{error}.") from error

    @contextmanager
    def registry() -> Iterator[Registry]:
        with registry_of(cluster(), home) as opening:
            yield opening()

    def add(opened: Registry, model: str, asked: AddRequest, by: Actor) -> Listed:
        from forebay.cli.registry.work import Registration, fetched, register

        settings = tuple(
            f"engine.{key}={msgspec.json.encode(value).decode()}" for key, value in asked.settings.items()
        )
        sent, source = asked.upload, asked.source
        if sent is None:
            registration = Registration(model, source, asked.task, asked.engine, settings, dict(asked.metadata))
            try:
                return register(opened, registration, by, fetched(source, home, report), report)
            except UserError as error:
                where = "\nThe cluster looks for paths on its own machine." if _is_missing(source) else ""
                raise Refusal(Code.CONFLICT, f"{error}{where}") from error
        registration = Registration(
            model, f"{SENT}{sent.name}", asked.task, asked.engine, settings, dict(asked.metadata)
        )
        with opened.sent(sent.manifest, sent.name, report) as path:
            try:
                return register(opened, registration, by, path, report)
            except UserError as error:  # paths on this machine mean nothing to the client
                raise Refusal(Code.CONFLICT, str(error).replace(str(path), sent.name)) from error

    return Catalogue(
        lambda: closing(store_of(cluster(), home)), registry, add, lambda: staging_of(cluster(), home), report
    )
