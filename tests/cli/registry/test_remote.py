"""`forebay registry --url`: what is said to a cluster that runs elsewhere is what would be done here."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from tests.control.api.stand import As, Idle, behind
from typer.testing import CliRunner

from forebay.cli.main import app
from forebay.cli.registry.served import catalogue_of
from forebay.cli.settings import UserError
from forebay.control.api.app import make_app
from forebay.control.api.behind import Behind
from forebay.control.api.server import AdminServer
from forebay.control.ports import Taken, bind
from forebay.core.cluster import Cluster
from forebay.core.registry.approval import Role
from forebay.core.tenancy.roles import Caller

MODELS = [{"name": "chat", "task": "chat", "source": "x", "engine": "synthetic"}]
CLUSTER = Cluster.model_validate({"models": MODELS, "registry": {"approvals_min": 1}})


@contextmanager
def served(parts: Behind) -> Iterator[str]:
    """A real listener, in a thread."""
    listener = bind("127.0.0.1", 0)
    assert not isinstance(listener, Taken)
    listener.listen()
    server = AdminServer(make_app(parts))
    thread = threading.Thread(target=lambda: asyncio.run(server.run_on(listener)))
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.stop()
    thread.join()


Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Runs `forebay` as somebody against a registry elsewhere; `whose` may be changed."""
    rig, whose = Idle(tmp_path), As()
    home = tmp_path / "home"
    home.mkdir()

    def quiet(stage: str, done: int, total: int | None) -> None:
        """Nobody looks."""

    parts = replace(behind(rig, tmp_path), catalogue=catalogue_of(lambda: CLUSTER, home, quiet), doorman=whose)
    with served(parts) as url:

        def run_as(who: str, role: Role, *words: str) -> Result:
            whose.caller = Caller(who, role)
            return CliRunner().invoke(app, [*words, "--url", url])

        yield run_as
    rig.journal.close()


@pytest.mark.slow
def test_a_revision_is_registered_approved_named_shown_and_checked_from_elsewhere(run: Run, tmp_path: Path) -> None:
    model = tmp_path / "weights.bin"
    model.write_bytes(b"weights")
    words = ("registry", "add", "chat", str(model), "--engine", "synthetic", "--task", "chat")
    added = run("bob", Role.OPERATOR, *words, "--set", "engine.step_ms=1.5", "--meta", "licence=mit", "--json")
    assert added.exit_code == 0, added.output + str(added.exception)
    listed = json.loads(added.stdout)
    name = f"chat@{listed['revision']['id']}"
    assert (listed["revision"]["created_by"], listed["standing"]["state"]) == ("bob", "pending")
    assert (listed["revision"]["settings"]["step_ms"], listed["revision"]["metadata"]) == (1.5, {"licence": "mit"})

    told = [
        run("ada", Role.ADMIN, "registry", "approve", name, "--reason", "fine").stdout,
        run("bob", Role.OPERATOR, "registry", "alias", name, "champion").stdout,
        run("eve", Role.VIEWER, "registry", "list", "chat").stdout,
        run("eve", Role.VIEWER, "registry", "show", "chat@champion").stdout,
        run("bob", Role.OPERATOR, "registry", "verify").stdout,
        run("ada", Role.ADMIN, "registry", "gc").stdout,
        run("eve", Role.VIEWER, "history", "model/chat").stdout,
    ]
    says = (
        "is approved",
        "chat@champion is",
        "approved",
        "mit",
        "as it was written",
        "0 B freed",
        "revision.approve",
    )
    assert [says_so in text for says_so, text in zip(says, told, strict=True)] == [True] * len(says), told
    assert run("ada", Role.ADMIN, "registry", "reject", name).exit_code == 0
    assert "is pending" in run("bob", Role.OPERATOR, "registry", "resubmit", name).stdout
    assert run("ada", Role.ADMIN, "registry", "add", "chat", str(model), "--engine", "synthetic").exit_code == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("registry", "show", "chat@none"), "there is no such revision"),
        (("registry", "gc"), "role_not_allowed"),
        (("registry", "add", "chat", "/nowhere"), "role_not_allowed"),
        (("registry", "add", "chat", "/nowhere", "--set", "models=1"), "engine.NAME=VALUE"),
        (("registry", "add", "chat", "/nowhere", "--set", "engine.a=["), "cannot be read"),
    ],
)
def test_what_cannot_be_is_said_as_it_is_here(run: Run, words: tuple[str, ...], says: str) -> None:
    done = run("eve", Role.VIEWER, *words)

    assert isinstance(done.exception, UserError), done.output
    assert says in str(done.exception)


@pytest.mark.parametrize("source", ["/nowhere", "0" * 4096])
def test_a_source_that_is_not_there_is_named(run: Run, source: str) -> None:
    done = run("bob", Role.OPERATOR, "registry", "add", "chat", source, "--engine", "synthetic")

    assert isinstance(done.exception, UserError)
    assert source in str(done.exception)
    assert "409" in str(done.exception)
