"""The commands of the registry; their implementation is imported when they run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli import settings
from forebay.cli.deploy.command import TokenOption
from forebay.cli.settings import WRONG_USAGE, UserError

if TYPE_CHECKING:
    from forebay.cli.registry.remote import RemoteRegistry
    from forebay.core.cluster import Cluster
    from forebay.core.registry.approval import Step
    from forebay.registry.catalogue import Actor, Registry

registry = typer.Typer(help="Registered models: revisions, approvals and aliases.", no_args_is_help=True)

FileOption = Annotated[
    Path | None, typer.Option("--file", "-f", help="Cluster file.", show_default="./forebay.yaml, else the demo")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NameArgument = Annotated[str, typer.Argument(metavar="MODEL@REVISION", help="A revision, by id or alias.")]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url", help="Admin API to use instead of the store.", show_default="FOREBAY_ADMIN_URL, else none: the store"
    ),
]
ReasonOption = Annotated[str, typer.Option("--reason", help="Reason, recorded in the history.")]


@registry.command()
def add(
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    source: Annotated[
        str,
        typer.Argument(
            help="package:…, s3://…, hf://…, mlflow:…, a local path, or, with --url, file:///… on the server."
        ),
    ],
    *,
    task: Annotated[str | None, typer.Option(help="chat, embed or tensor.", show_default="from the source")] = None,
    engine: Annotated[str | None, typer.Option(help="Engine.", show_default="from the source")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="A setting, such as engine.threads=2.")
    ] = None,
    meta: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Metadata, such as licence=apache-2.0."),
    ] = None,
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Register a model: its files are copied and never change. Registering it again gives the same revision."""
    from forebay.cli.registry import work

    metadata = dict(_pair(each) for each in meta or [])
    registration = work.Registration(model, source, task, engine, tuple(set_ or []), metadata)
    with _opened(file, url, token_file) as opened:
        work.add(opened, registration, _actor(), settings.home(), as_json)


@registry.command("list")
def list_(
    model: Annotated[str | None, typer.Argument(help="Only this model.")] = None,
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """List revisions."""
    from forebay.cli.registry import work

    with _opened(file, url, token_file) as opened:
        work.show_all(opened.revisions(model), as_json)


@registry.command()
def show(
    name: NameArgument,
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show everything that is known about a revision."""
    from forebay.cli.registry import work

    with _opened(file, url, token_file) as opened:
        work.show(opened.show(*_split(name)), as_json)


@registry.command()
def approve(
    name: NameArgument,
    reason: ReasonOption = "",
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
) -> None:
    """Approve a revision. It may be served once `registry.approvals_min` people have approved it."""
    from forebay.core.registry.approval import Step

    _step(name, Step.APPROVE, reason, (file, url, token_file))


@registry.command()
def reject(
    name: NameArgument,
    reason: ReasonOption = "",
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
) -> None:
    """Reject a revision, even an approved one: from the next start on it is not served."""
    from forebay.core.registry.approval import Step

    _step(name, Step.REJECT, reason, (file, url, token_file))


@registry.command()
def resubmit(
    name: NameArgument,
    reason: ReasonOption = "",
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
) -> None:
    """Submit a rejected revision for approval again."""
    from forebay.core.registry.approval import Step

    _step(name, Step.RESUBMIT, reason, (file, url, token_file))


@registry.command()
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
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
) -> None:
    """Sign a revision's artifact as its publisher; `registry.publishers` lists the trusted publishers.

    The key stays on this machine, also with --url: only the signature is sent.
    """
    from forebay.cli.registry import signing

    if (key is None) == (bundle is None):
        raise UserError("Expected either --key FILE or --bundle FILE.", WRONG_USAGE)
    if files is not None and key is None:
        raise UserError("--files needs --key: a bundle lists its own files.", WRONG_USAGE)
    with _opened(file, url, token_file) as opened:
        if bundle is not None:
            listed = signing.attach(opened, _split(name), bundle, _actor())
        else:
            assert key is not None
            listed = signing.sign(opened, _split(name), key, files, _actor())
        typer.echo(f"{listed.revision.name} is signed with the key {' and the key '.join(listed.signed_by)}.")


@registry.command()
def alias(
    name: NameArgument,
    alias: Annotated[str, typer.Argument(help="Alias, such as `champion`.")],
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
) -> None:
    """Point an alias at a revision, replacing any earlier target."""
    with _opened(file, url, token_file) as opened:
        model, revision = _split(name)
        listed = opened.set_alias(model, alias, revision, _actor())
        typer.echo(f"{model}@{alias} is {listed.revision.id}.")


@registry.command()
def verify(
    model: Annotated[str | None, typer.Argument(help="Only this model.")] = None,
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Verify every byte of files, records and history; exits with 1 if anything was changed."""
    from forebay.cli.registry import work

    with _opened(file, url, token_file) as opened:
        raise typer.Exit(work.verify(opened, model, as_json))


@registry.command()
def gc(file: FileOption = None, url: UrlOption = None, token_file: TokenOption = None) -> None:
    """Remove files that no revision refers to any more."""
    from forebay.cli.registry import work

    with _opened(file, url, token_file) as opened:
        typer.echo(f"{work.size(opened.sweep())} freed.")


def history(
    subject: Annotated[
        str | None,
        typer.Argument(
            help="What the events are about, such as model/chat or model/chat/r-1234abcd.", show_default="all"
        ),
    ] = None,
    *,
    last: Annotated[int, typer.Option(min=1, max=100_000, help="Number of most recent events to show.")] = 50,
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show who changed what, when and why, in this cluster and in the registry (shared by clusters of one store)."""
    from forebay.cli.registry import work

    if through_api(file, url, token_file):
        found = _remote(file, url, token_file).history(subject, min(last, 1000))
    else:
        with _named_errors():
            found = work.newest(_cluster(file), settings.home(), subject, last)
    work.show_history(found, as_json)


def _step(name: str, step: "Step", reason: str, where: tuple[Path | None, str | None, Path | None]) -> None:
    with _opened(*where) as opened:
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


def through_api(file: Path | None, url: str | None, token_file: Path | None) -> bool:
    """Whether to use the admin API, given by a URL or a key, instead of the store. The environment counts only if no
    cluster file is given: the first key is created beside the cluster, wherever the environment points to."""
    if url or token_file:
        return True
    return file is None and bool(os.environ.get("FOREBAY_ADMIN_URL") or os.environ.get("FOREBAY_ADMIN_TOKEN"))


def _remote(file: Path | None, url: str | None, token_file: Path | None) -> "RemoteRegistry":
    from forebay.cli.deploy.client import Admin
    from forebay.cli.registry.remote import RemoteRegistry

    return RemoteRegistry(Admin(url, token_file, file))


@contextmanager
def _opened(file: Path | None, url: str | None, token_file: Path | None) -> "Iterator[Registry | RemoteRegistry]":
    """The registry of the cluster file; with a URL or a key, that behind an admin API."""
    with _named_errors():
        if through_api(file, url, token_file):
            yield _remote(file, url, token_file)
            return
        from forebay.cli.registry.opening import registry_of

        with registry_of(_cluster(file), settings.home()) as opening:
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
