"""`forebay keys --url`: commands on a remote cluster behave like local ones."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from tests.cli.registry.test_remote import served
from tests.control.api.rig import FixedCaller, IdleControl, services
from typer.testing import CliRunner

from forebay.cli.main import app
from forebay.cli.settings import UserError
from forebay.core.registry.approval import Role
from forebay.core.tenancy.roles import Caller

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Runs `forebay keys` in some role against a cluster elsewhere."""
    rig, whose = IdleControl(tmp_path), FixedCaller()
    with served(replace(services(rig, tmp_path), authenticator=whose)) as url:

        def run_as(role: Role, *words: str) -> Result:
            whose.caller = Caller("ada", role)
            return CliRunner().invoke(app, ["keys", *words, "--url", url])

        yield run_as
    rig.journal.close()


def test_keys_are_created_listed_rotated_and_revoked_remotely(run: Run, tmp_path: Path) -> None:
    done = run(Role.ADMIN, "create", "--tenant", "team-a", "--expires", "90d")
    key = done.stdout.strip()
    assert key.startswith("fb-"), done.output
    assert "tenant team-a, valid until" in done.stderr
    bob = run(Role.ADMIN, "create", "--admin", "operator", "--name", "bob").stdout.strip()
    new = run(Role.ADMIN, "rotate", key[3:11], "--overlap", "1h")
    assert f"Key {key[3:11]} stays valid until" in new.stderr
    assert f"Key {bob[3:11]} is revoked." in run(Role.ADMIN, "revoke", bob[3:11]).stdout
    rows = json.loads(run(Role.ADMIN, "list", "--json").stdout)
    assert [(row["tenant"] or row["name"], row["state"]) for row in rows] == [
        ("team-a", "good"),
        ("team-a", "good"),
        ("bob", "revoked"),
    ]
    assert rows[0]["expires"].endswith("Z")
    assert "admin API: operator" in run(Role.ADMIN, "list").stdout


@pytest.mark.parametrize(
    ("role", "words", "says"),
    [
        (Role.OPERATOR, ("create", "--tenant", "team-a"), "createKey needs the role admin"),
        (Role.OPERATOR, ("revoke", "aaaaaaaa"), "revokeKey needs the role admin"),
        (Role.ADMIN, ("create", "--tenant", "nobody"), "there is: team-a, ops"),
        (Role.ADMIN, ("revoke", "a b?c"), "There is no key 'a b?c'"),
        (Role.ADMIN, ("rotate", "aaaaaaaa"), "forebay keys list"),
    ],
)
def test_remote_errors_equal_local_ones(run: Run, role: Role, words: tuple[str, ...], says: str) -> None:
    done = run(role, *words)
    assert isinstance(done.exception, UserError), done.output
    assert says in str(done.exception)
