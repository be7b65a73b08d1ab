"""`forebay explain`, `usage` and `audit` with `--url`: a remote cluster answers like its local files."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from tests.cli.records.test_records import decided, keep
from tests.cli.registry.test_remote import served
from tests.control.api.rig import FixedCaller, IdleControl, services
from typer.testing import CliRunner

from forebay.cli.main import app
from forebay.cli.records.reading import RecordFiles
from forebay.cli.settings import UserError
from forebay.core.registry.approval import Role
from forebay.core.tenancy.roles import Caller
from forebay.gateway.records.saved import DAY_S
from forebay.obs.clock import wall_s

Run = Callable[..., Result]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Records of a cluster with two gateways."""
    root = tmp_path / "records"
    keep(root, "gateway-0", decided("req-1"), decided("req-2", tenant="umbra"))
    keep(root, "gateway-1", decided("req+3 &x=1", code="client_closed"), decided("req-4", ts=wall_s() - 3 * DAY_S))
    return root


@pytest.fixture
def run(tmp_path: Path, root: Path) -> Iterator[Run]:
    """Runs `forebay` in some role against a cluster elsewhere."""
    rig, whose = IdleControl(tmp_path), FixedCaller()
    with served(replace(services(rig, tmp_path), authenticator=whose, records=RecordFiles(root))) as url:

        def run_as(role: Role, *words: str) -> Result:
            whose.caller = Caller("ada", role)
            return CliRunner().invoke(app, [*words, "--url", url])

        yield run_as
    rig.journal.close()


@pytest.mark.parametrize(
    ("role", "words"),
    [
        (Role.VIEWER, ("explain", "req-1")),
        (Role.VIEWER, ("explain", "req-1", "--json")),
        (Role.VIEWER, ("explain", "req+3 &x=1")),
        (Role.VIEWER, ("usage",)),
        (Role.VIEWER, ("usage", "--json", "--tenant", "acme", "--model", "chat", "--since", "2d")),
        (Role.VIEWER, ("usage", "--since", "9999d")),
        (Role.OPERATOR, ("audit", "verify")),
        (Role.OPERATOR, ("audit", "verify", "--json", "--archived")),
        (Role.ADMIN, ("audit", "tail")),
        (Role.ADMIN, ("audit", "tail", "--json", "-n", "3")),
    ],
)
def test_remote_output_equals_local_output(run: Run, root: Path, role: Role, words: tuple[str, ...]) -> None:
    there, here = run(role, *words), CliRunner().invoke(app, [*words, "--folder", str(root)])

    assert there.exit_code == here.exit_code == 0, there.output + str(there.exception)
    assert there.stdout == here.stdout
    assert len(there.stdout.splitlines()) > 1


def test_remote_verify_detects_a_modified_log(run: Run, root: Path) -> None:
    path = root / "gateway-0/audit-00000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b"acme", b"evil"))

    done = run(Role.OPERATOR, "audit", "verify")
    assert done.exit_code == 1
    assert "audit-00000001.jsonl:1: changed" in done.stdout


def test_lines_too_long_for_a_response_are_omitted_and_reported(
    run: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(Role.ADMIN, "audit", "tail", "--json")
    assert (len(whole.stdout.splitlines()), whole.stderr) == (4, "")
    longest = max(map(len, whole.stdout.splitlines()))
    monkeypatch.setattr("forebay.control.api.operations.records.TAIL_BYTES_MAX", 2 * longest)

    cut = run(Role.ADMIN, "audit", "tail", "--json", "-n", "4")
    assert cut.stdout.splitlines() == whole.stdout.splitlines()[-2:]
    assert "2 of 4 lines" in cut.stderr


@pytest.mark.parametrize(
    ("role", "words", "says"),
    [
        (Role.VIEWER, ("explain", "req-0"), "no record of req-0"),
        (Role.VIEWER, ("explain", ""), "expected the `x-request-id`"),
        (Role.VIEWER, ("usage", "--since", "long ago"), "such as 7d"),
        (Role.VIEWER, ("usage", "--tenant", "\x1b"), "printable"),
        (Role.VIEWER, ("audit", "verify"), "verifyAudit needs the role operator"),
        (Role.OPERATOR, ("audit", "tail"), "auditTail needs the role admin"),
        (Role.ADMIN, ("audit", "tail", "-n", "1001"), "an integer from 1 to 1000"),
    ],
)
def test_remote_errors_equal_local_ones(run: Run, role: Role, words: tuple[str, ...], says: str) -> None:
    done = run(role, *words)

    assert isinstance(done.exception, UserError), done.output
    assert says in str(done.exception)


def test_cluster_without_an_audit_log_is_an_error(run: Run, root: Path) -> None:
    for path in [*root.glob("*/audit*"), *root.glob("*/usage*"), *root.glob("*/lock")]:
        path.unlink()  # what is left is that of a gateway without one

    for words in (("audit", "verify"), ("audit", "tail")):
        done = run(Role.ADMIN, *words)
        assert isinstance(done.exception, UserError)
        assert "There is no audit log in http://127.0.0.1" in str(done.exception)
