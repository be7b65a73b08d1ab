"""`forebay registry --url`: commands on a remote cluster behave like local ones."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from tests.control.api.rig import FixedCaller, IdleControl, services
from typer.testing import CliRunner

from forebay.cli.main import app
from forebay.cli.registry.served import catalogue_of
from forebay.cli.settings import UserError
from forebay.control.api.app import make_app
from forebay.control.api.server import AdminServer
from forebay.control.api.services import Services
from forebay.control.ports import Taken, bind
from forebay.core.cluster import Cluster
from forebay.core.registry.approval import Role
from forebay.core.tenancy.roles import Caller
from forebay.registry.signing import own_signer, read_public

MODELS = [{"name": "chat", "task": "chat", "source": "x", "engine": "synthetic"}]
OPENSSF = Path(__file__).parents[2] / "registry" / "openssf"
CLUSTER = Cluster.model_validate({"models": MODELS, "registry": {"approvals_min": 1}})
SIGNED = Cluster.model_validate({"models": MODELS, "registry": {"publishers": [str(OPENSSF / "p256.pub")]}})


@contextmanager
def served(parts: Services) -> Iterator[str]:
    """A real listener, in a thread."""
    listener = bind("127.0.0.1", 0)
    assert not isinstance(listener, Taken)
    listener.listen()
    server = AdminServer(make_app(parts))
    with asyncio.Runner() as runner:
        thread = threading.Thread(target=runner.run, args=[server.run_on(listener)])
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        runner.get_loop().call_soon_threadsafe(server.stop)
        thread.join()


Run = Callable[..., Result]


@pytest.fixture
def cluster() -> Cluster:
    """The cluster that is asked."""
    return CLUSTER


@pytest.fixture
def run(tmp_path: Path, cluster: Cluster) -> Iterator[Run]:
    """Runs `forebay` as somebody against a registry elsewhere; `whose` may be changed."""
    rig, whose = IdleControl(tmp_path), FixedCaller()
    home = tmp_path / "home"
    home.mkdir()

    def quiet(stage: str, done: int, total: int | None) -> None:
        """Nobody looks."""

    parts = replace(
        services(rig, tmp_path), catalogue=catalogue_of(lambda: cluster, home, quiet), authenticator=whose
    )
    with served(parts) as url:

        def run_as(who: str, role: Role, *words: str) -> Result:
            whose.caller = Caller(who, role)
            return CliRunner().invoke(app, [*words, "--url", url])

        yield run_as
    rig.journal.close()


@pytest.mark.slow
def test_revision_is_added_approved_aliased_shown_and_verified_remotely(run: Run, tmp_path: Path) -> None:
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
        "is unmodified",
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
        (("registry", "add", "chat", "file:///nowhere"), "role_not_allowed"),
        (("registry", "add", "chat", str(OPENSSF / "model")), "lacking needs the role operator"),
        (("registry", "add", "chat", "file://host/nowhere"), "not of the form file:///PATH"),
        (("registry", "add", "chat", "/nowhere", "--set", "models=1"), "engine.NAME=VALUE"),
        (("registry", "add", "chat", "/nowhere", "--set", "engine.a=["), "not valid YAML"),
        (("registry", "add", "chat", "file:///nowhere", "--set", "engine.a=2026-13-45"), "role_not_allowed"),
    ],
)
def test_remote_errors_equal_local_ones(run: Run, words: tuple[str, ...], says: str) -> None:
    done = run("eve", Role.VIEWER, *words)

    assert isinstance(done.exception, UserError), done.output
    assert says in str(done.exception)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("file:///nowhere", "looks for paths on its own machine. [conflict] (HTTP 409)"),
        ("/nowhere", "on this machine. For a path on the cluster's machine use file:///nowhere"),
        ("0" * 3000, "File name too long"),
    ],
)
def test_missing_source_is_named(run: Run, source: str, says: str) -> None:
    done = run("bob", Role.OPERATOR, "registry", "add", "chat", source, "--engine", "synthetic")

    assert isinstance(done.exception, UserError)
    assert source.removeprefix("file://") in str(done.exception)
    assert says in str(done.exception)


def added(run: Run, model: Path) -> str:
    words = ("registry", "add", "chat", str(model), "--engine", "synthetic", "--task", "chat", "--json")
    return f"chat@{json.loads(run('bob', Role.OPERATOR, *words).stdout)['revision']['id']}"


def key_file(folder: Path) -> Path:
    path = folder / "publisher.pem"
    own_signer(path)
    return path


def signatures(run: Run, name: str) -> list[str]:
    shown = json.loads(run("eve", Role.VIEWER, "registry", "show", name, "--json").stdout)
    found: list[str] = shown["signed_by"]
    return found


def test_remote_signing_never_sends_the_private_key(run: Run, tmp_path: Path) -> None:
    name, key = added(run, OPENSSF / "model"), key_file(tmp_path)
    signing = ("registry", "sign", name, "--key", str(key))

    refused = run("eve", Role.VIEWER, *signing)
    assert "sign needs the role operator" in str(refused.exception)
    other = run("bob", Role.OPERATOR, *signing, "--files", str(tmp_path / "publisher.pem"))
    assert "Nothing was signed" in str(other.exception)
    nothing = run("bob", Role.OPERATOR, *signing, "--files", str(tmp_path / "none"))
    assert "none: no such file or folder" in str(nothing.exception)
    assert signatures(run, name) == []
    done = run("bob", Role.OPERATOR, *signing, "--files", str(OPENSSF / "model"))
    public = own_signer(key).public
    assert f"{name} is signed with the key {public}." in done.stdout
    assert signatures(run, name) == [public]
    (event,) = json.loads(run("eve", Role.VIEWER, "history", "model/chat", "--last", "1", "--json").stdout)
    assert (event["actor"], event["kind"]) == ("bob", "artifact.signed")
    assert json.loads(event["document"]) == {"public": public}
    kept = [each for each in (tmp_path / "home").rglob("*") if each.is_file()]
    assert [each for each in kept if key.read_bytes() in each.read_bytes()] == []


@pytest.mark.parametrize("cluster", [SIGNED])
def test_openssf_signature_is_uploaded(run: Run, tmp_path: Path) -> None:
    name = added(run, OPENSSF / "model")
    signing = ("registry", "sign", name, "--bundle")

    refused = run("bob", Role.OPERATOR, *signing, str(OPENSSF / "p384.sig"))
    assert "the signature was not made by a key in `registry.publishers`" in str(refused.exception)
    broken = tmp_path / "model.sig"
    broken.write_bytes((OPENSSF / "p256.sig").read_bytes()[1:])
    assert f"{broken}: not a signature" in str(run("bob", Role.OPERATOR, *signing, str(broken)).exception)
    assert signatures(run, name) == []
    done = run("bob", Role.OPERATOR, *signing, str(OPENSSF / "p256.sig"))
    assert signatures(run, name) == [read_public(OPENSSF / "p256.pub")], done.output
