"""The commands of the registry; their implementation is imported when they run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli import settings
from forebay.cli.options import (
    ENGINES_HELP,
    FROM_SOURCE,
    TASKS_HELP,
    JsonOption,
    ReasonOption,
    StoreOptions,
    with_fields,
)
from forebay.cli.settings import WRONG_USAGE, UserError

if TYPE_CHECKING:
    from forebay.cli.registry.remote import RemoteRegistry
    from forebay.core.cluster import Cluster
    from forebay.core.registry.approval import Step
    from forebay.registry.catalogue import Actor, Registry

registry = typer.Typer(help="Registered models: revisions, approvals and aliases.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(metavar="MODEL@REVISION", help="A revision, by id or alias.")]


@registry.command()
@with_fields(api=StoreOptions)
def add(
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    source: Annotated[
        str,
        typer.Argument(
            help="package:…, s3://…, hf://…, mlflow:…, a local path, or, with --url, file:///… on the server."
        ),
    ],
    *,
    task: Annotated[str | None, typer.Option(help=TASKS_HELP, show_default=FROM_SOURCE)] = None,
    engine: Annotated[str | None, typer.Option(help=ENGINES_HELP, show_default=FROM_SOURCE)] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="A setting, such as engine.threads=2.")
    ] = None,
    meta: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Metadata, such as licence=apache-2.0."),
    ] = None,
    api: StoreOptions,
    as_json: JsonOption = False,
) -> None:
    """Register a model: its files are copied and never change. Registering it again gives the same revision."""
    from forebay.cli.registry import work

    metadata = dict(_pair(each) for each in meta or [])
    registration = work.Registration(model, source, task, engine, tuple(set_ or []), metadata)
    with _opened(api) as opened:
        work.add(opened, registration, _actor(), settings.home(), as_json)


@registry.command("list")
@with_fields(api=StoreOptions)
def list_(
    model: Annotated[str | None, typer.Argument(help="Only this model.")] = None,
    *,
    api: StoreOptions,
    as_json: JsonOption = False,
) -> None:
    """List revisions."""
    from forebay.cli.registry import work

    with _opened(api) as opened:
        work.show_all(opened.revisions(model), as_json)


@registry.command()
@with_fields(api=StoreOptions)
def show(
    name: NameArgument,
    *,
    api: StoreOptions,
    as_json: JsonOption = False,
) -> None:
    """Show everything that is known about a revision."""
    from forebay.cli.registry import work

    with _opened(api) as opened:
        work.show(opened.show(*_split(name)), as_json)


@registry.command()
@with_fields(api=StoreOptions)
def approve(
    name: NameArgument,
    reason: ReasonOption = "",
    *,
    api: StoreOptions,
) -> None:
    """Approve a revision. It may be served once `registry.approvals_min` people have approved it."""
    from forebay.core.registry.approval import Step

    _step(name, Step.APPROVE, reason, api)


@registry.command()
@with_fields(api=StoreOptions)
def reject(
    name: NameArgument,
    reason: ReasonOption = "",
    *,
    api: StoreOptions,
) -> None:
    """Reject a revision, even an approved one: from the next start on it is not served."""
    from forebay.core.registry.approval import Step

    _step(name, Step.REJECT, reason, api)


@registry.command()
@with_fields(api=StoreOptions)
def resubmit(
    name: NameArgument,
    reason: ReasonOption = "",
    *,
    api: StoreOptions,
) -> None:
    """Submit a rejected revision for approval again."""
    from forebay.core.registry.approval import Step

    _step(name, Step.RESUBMIT, reason, api)


@registry.command()
@with_fields(api=StoreOptions)
def sign(
    name: NameArgument,
    *,
    key: Annotated[
        Path | None, typer.Option(help="PEM file with an Ed25519 private key.", show_default=False)
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            help="Instead of --key: a signature made by `model_signing sign key` (`model.sig`).", show_default=False
        ),
    ] = None,
    files: Annotated[
        Path | None,
        typer.Option(help="With --key: sign only if the artifact matches these local files.", show_default=False),
    ] = None,
    api: StoreOptions,
) -> None:
    """Sign a revision's artifact as its publisher; `registry.publishers` lists the trusted publishers.

    The key stays on this machine, also with --url: only the signature is sent.
    """
    from forebay.cli.registry import signing

    if (key is None) == (bundle is None):
        raise UserError("Expected either --key FILE or --bundle FILE.", WRONG_USAGE)
    if files is not None and key is None:
        raise UserError("--files needs --key: a bundle lists its own files.", WRONG_USAGE)
    with _opened(api) as opened:
        if bundle is not None:
            listed = signing.attach(opened, _split(name), bundle, _actor())
        else:
            assert key is not None
            listed = signing.sign(opened, _split(name), key, files, _actor())
        typer.echo(f"{listed.revision.name} is signed with the key {' and the key '.join(listed.signed_by)}.")


@registry.command()
@with_fields(api=StoreOptions)
def alias(
    name: NameArgument,
    alias: Annotated[str, typer.Argument(help="Alias, such as `champion`.")],
    *,
    api: StoreOptions,
) -> None:
    """Point an alias at a revision, replacing any earlier target."""
    with _opened(api) as opened:
        model, revision = _split(name)
        listed = opened.set_alias(model, alias, revision, _actor())
        typer.echo(f"{model}@{alias} is {listed.revision.id}.")


@registry.command()
@with_fields(api=StoreOptions)
def verify(
    model: Annotated[str | None, typer.Argument(help="Only this model.")] = None,
    *,
    api: StoreOptions,
    as_json: JsonOption = False,
) -> None:
    """Verify every byte of files, records and history; exits with 1 if anything was changed."""
    from forebay.cli.registry import work

    with _opened(api) as opened:
        raise typer.Exit(work.verify(opened, model, as_json))


@registry.command()
@with_fields(api=StoreOptions)
def gc(*, api: StoreOptions) -> None:
    """Remove files that no revision refers to any more."""
    from forebay.cli.registry import work

    with _opened(api) as opened:
        typer.echo(f"{work.size(opened.sweep())} freed.")


@with_fields(api=StoreOptions)
def history(
    subject: Annotated[
        str | None,
        typer.Argument(
            help="What the events are about, such as model/chat or model/chat/r-1234abcd.", show_default="all"
        ),
    ] = None,
    *,
    last: Annotated[int, typer.Option(min=1, max=100_000, help="Number of most recent events to show.")] = 50,
    api: StoreOptions,
    as_json: JsonOption = False,
) -> None:
    """Show who changed what, when and why, in this cluster and in the registry (shared by clusters of one store)."""
    from forebay.cli.registry import work

    if api.through_api:
        found = _remote(api).history(subject, min(last, 1000))
    else:
        with _named_errors():
            found = work.newest(_cluster(api.file), settings.home(), subject, last)
    work.show_history(found, as_json)


def _step(name: str, step: "Step", reason: str, api: StoreOptions) -> None:
    with _opened(api) as opened:
        listed = opened.step(*_split(name), step, _actor(), reason)
        typer.echo(f"{listed.revision.name} is {listed.standing.state}: {listed.standing.why}.")


def _cluster(file: Path | None) -> "Cluster":
    return settings.load_cluster(settings.read_file(file), [], os.environ)


def account() -> str:
    """The user who runs the command; environment variables could be forged."""
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a user id without a name
        return f"uid-{os.getuid()}"


def _actor() -> "Actor":
    """The user who runs the command: whoever can write to the store has all permissions, so no role is checked."""
    from forebay.registry.catalogue import Actor

    return Actor(account())


def _split(name: str) -> tuple[str, str]:
    model, at, revision = name.partition("@")
    if not (model and at and revision):
        listing = f"`forebay registry list{f' {model}' if model else ''}` shows what there is"
        raise UserError(f"{name!r}: expected MODEL@REVISION, such as chat@champion; {listing}.", WRONG_USAGE)
    return model, revision


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise UserError(f"--meta {text!r}: expected KEY=VALUE, such as licence=apache-2.0.", WRONG_USAGE)
    return key, value


def _remote(api: StoreOptions) -> "RemoteRegistry":
    from forebay.cli.registry.remote import RemoteRegistry

    return RemoteRegistry(api.admin())


@contextmanager
def _opened(api: StoreOptions) -> "Iterator[Registry | RemoteRegistry]":
    """The registry of the cluster file; with a URL or a key, that behind an admin API."""
    with _named_errors():
        if api.through_api:
            yield _remote(api)
            return
        from forebay.cli.registry.opening import registry_of

        with registry_of(_cluster(api.file), settings.home()) as opening:
            yield opening()


@contextmanager
def _named_errors() -> Iterator[None]:
    from forebay.registry.proved import RegistryError
    from forebay.registry.sources import SourceError
    from forebay.store.database import StoreError

    try:
        yield
    except (RegistryError, SourceError, StoreError) as error:
        raise UserError(str(error)) from error
