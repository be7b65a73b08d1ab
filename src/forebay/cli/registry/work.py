"""Implementation and output of the commands of the registry."""

from collections import deque
from collections.abc import Collection, Iterable
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table
from rich.text import Text

from forebay.cli import settings
from forebay.cli.registry.artifacts import default_engine
from forebay.cli.registry.facts import facts_of
from forebay.cli.registry.opening import store_of
from forebay.cli.serve import ModelOptions, cluster_of
from forebay.cli.settings import WRONG_USAGE, UserError
from forebay.cli.view.screen import Screen
from forebay.cli.view.table import Fitting, table
from forebay.core.cluster import Cluster
from forebay.core.model import Task
from forebay.core.registry.approval import ApprovalState
from forebay.engines.protocol import EngineBroken
from forebay.modelserver.replica.choosing import is_repository
from forebay.registry.catalogue import Actor, Description, Listed, Registry
from forebay.registry.sources import Progress, SourceError, obtain, parse
from forebay.store import events

if TYPE_CHECKING:
    from forebay.cli.registry.remote import RemoteRegistry

COLUMNS = ("model", "revision", "state", "aliases", "task", "engine", "size", "registered (UTC)", "by")
SPARE = ("task", "size", "engine", "by")
"""Columns that a narrow terminal does not get, the first ones first."""
STYLES = {ApprovalState.APPROVED: "green", ApprovalState.PENDING: "yellow", ApprovalState.REJECTED: "red"}


@dataclass(frozen=True, slots=True)
class Registration:
    """The options of a model to register."""

    model: str
    source: str
    task: str | None
    engine: str | None
    settings: tuple[str, ...]
    metadata: dict[str, str]


def add(
    registry: "Registry | RemoteRegistry", registration: Registration, by: Actor, home: Path, as_json: bool
) -> None:
    """Register a model, and print the next step. Raises `UserError`."""
    with Screen(settings.screen(stderr=True)) as screen:
        if isinstance(registry, Registry):
            progress = screen.progress(registration.model)
            listed = register(registry, registration, by, fetched(registration.source, home, progress), progress)
        else:
            listed = registry.add(registration, screen.progress(registration.model))
    if as_json:
        _print(listed)
        return
    id, stands = listed.revision.id, listed.standing
    screen.line(f"{registration.model}@{id} is {stands.state}: {stands.why}.", STYLES[stands.state])
    if stands.state is ApprovalState.PENDING:
        screen.line(f"Next: forebay registry approve {registration.model}@{id}")
    elif stands.state is ApprovalState.APPROVED:
        screen.line(f"Roll it out with `forebay deploy {registration.model} --revision {id}`,")
        screen.line(f"or serve it with `source: registry:{registration.model}@{id}` in the cluster file.")


def fetched(source: str, home: Path, progress: Progress) -> Path:
    """The files to register, on this machine. Raises `UserError`."""
    try:
        return obtain(parse(source), home, progress)
    except (SourceError, OSError) as error:
        raise UserError(str(error)) from error


def register(registry: Registry, registration: Registration, by: Actor, path: Path, progress: Progress) -> Listed:
    """Register the files at a path with the engine that runs them. Raises `UserError`."""
    try:
        task, name = _task(registration.task), registration.engine
        if name is None and task is not Task.TENSOR and not is_repository(path):
            name = default_engine(path).name
        options = ModelOptions(str(path), registration.model, task, name, 1, None)
        (model,) = cluster_of(options, registration.settings, {}, "forebay registry add").models
        engine = model.engine or default_engine(path)
    except (SourceError, EngineBroken, OSError) as error:
        raise UserError(str(error)) from error
    what = Description(
        model=registration.model,
        source=registration.source,
        task=model.task,
        engine=engine.name,
        settings=engine.model_dump(),
        metadata={**facts_of(path), **registration.metadata},
    )
    return registry.add(what, path, by, progress)


def _task(name: str | None) -> Task | None:
    if name is None:
        return None
    try:
        return Task(name)
    except ValueError:
        raise UserError(f"--task {name!r}: expected {', '.join(Task)}.", WRONG_USAGE) from None


def show_all(listed: Iterable[Listed], as_json: bool) -> None:
    """One line for each revision."""
    listed = tuple(listed)
    if as_json:
        _print(listed)
        return
    if not listed:
        settings.screen().print("Nothing is registered yet: `forebay registry add MODEL SOURCE`.")
        return
    settings.screen().print(Fitting(partial(listing, listed), SPARE))


def listing(listed: Iterable[Listed], without: Collection[str]) -> Table:
    """A row for each revision; ids stay in one piece, as they are copied into other commands."""
    kept = [at for at, name in enumerate(COLUMNS) if name not in without]
    shown = table(*(COLUMNS[at] for at in kept), right=("size",), whole=("revision",))
    for each in listed:
        revision = each.revision
        cells = (
            revision.model,
            revision.id,
            Text(each.standing.state, STYLES[each.standing.state]),
            ", ".join(each.aliases),
            revision.task,
            revision.engine,
            size(each.size_bytes),
            _time(revision.created_at),
            revision.created_by,
        )
        shown.add_row(*(cells[at] for at in kept))
    return shown


def show(listed: Listed, as_json: bool) -> None:
    """All details of a revision."""
    if as_json:
        _print(listed)
        return
    revision, stands = listed.revision, listed.standing
    rows = {
        "revision": revision.name,
        "state": f"{stands.state}: {stands.why}",
        "aliases": ", ".join(listed.aliases) or "none",
        "task": str(revision.task),
        "engine": ", ".join(f"{key}={value}" for key, value in revision.settings.items()),
        "source": revision.source,
        "artifact": f"{revision.artifact} ({size(listed.size_bytes)})",
        "signed by": ", ".join(listed.signed_by) or "no one",
        "registered": f"{_time(revision.created_at)} by {revision.created_by}",
        **revision.metadata,
    }
    shown = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for key, value in rows.items():
        shown.add_row(Text(key, "bold"), Text(value, STYLES[stands.state] if key == "state" else ""))
    settings.screen().print(shown)


def verify(registry: "Registry | RemoteRegistry", model: str | None, as_json: bool) -> int:
    """Verify everything, and print what was modified; returns 1 if anything was."""
    with Screen(settings.screen(stderr=True)) as screen:
        wrong = registry.verify(screen.progress("registry"), model)
    if as_json:
        _print({"ok": not wrong, "wrong": wrong})
    elif wrong:
        for text in wrong:
            screen.line(text, "red")
    else:
        settings.screen().print("Everything is unmodified.", style="green")
    return 1 if wrong else 0


def newest(cluster: Cluster, home: Path, subject: str | None, last: int) -> tuple[events.Event, ...]:
    """The newest events, oldest first. Raises `StoreError`."""
    with closing(store_of(cluster, home)) as store, store.read() as connection:
        return tuple(deque(events.since(connection, subject=subject, cluster=cluster.name), maxlen=last))


def show_history(found: Collection[events.Event], as_json: bool) -> None:
    """One line for each event."""
    if as_json:
        _print(tuple(found))
        return
    shown = table("#", "time (UTC)", "who", "what", "of", "why", right=("#",))
    for event in found:
        shown.add_row(str(event.number), _time(event.at), event.actor, event.kind, event.subject, event.why)
    settings.screen().print(shown if found else "No events yet.")


def size(count: int) -> str:
    """A number of bytes with a unit."""
    return f"{count / 1e6:,.1f} MB" if count >= 100_000 else f"{count:,} B"


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")


def _print(value: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(value)).decode())
