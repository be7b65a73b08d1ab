"""`forebay keys`: a key is shown once, its stored hash authenticates it, and errors say what to do."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from forebay.cli.keys.command import duration_s
from forebay.cli.main import app
from forebay.cli.registry.command import account
from forebay.cli.settings import UserError
from forebay.core.registry.approval import Role
from forebay.core.tenancy import Denied, Directory, Granted, Tenant, authorise
from forebay.core.tenancy.roles import Admins, Caller
from forebay.obs.clock import wall_s
from forebay.registry.keys import read_keys

FILE = """\
name: test
gateway: {auth: keys}
tenants: [{name: team-a}, {name: ops}]
models: [{name: chat, task: chat, source: none, engine: synthetic}]
"""
KEYS = ".forebay/run/test/keys.json"

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `forebay keys` in this process, in a folder with a cluster file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FOREBAY_HOME", raising=False)
    (tmp_path / "forebay.yaml").write_text(FILE)
    return lambda *words: CliRunner().invoke(app, ["keys", *words])


def made(run: Run, *words: str) -> tuple[str, str]:
    """Create a key: its id, and the key."""
    done = run("create", *words)
    assert done.exit_code == 0, done.output
    key = done.stdout.strip()
    return key[3:11], key


def opens(key: str) -> bool:
    tenants = [Tenant("team-a"), Tenant("ops")]
    verdict = authorise(Directory(tenants, read_keys(Path(KEYS))), key.encode(), wall_s())
    assert isinstance(verdict, Granted | Denied)
    return isinstance(verdict, Granted)


def refused(run: Run, *words: str) -> UserError:
    done = run(*words)
    assert isinstance(done.exception, UserError), done.output
    return done.exception


def test_create_prints_only_the_valid_key_on_stdout(run: Run) -> None:
    done = run("create", "--tenant", "team-a")

    assert done.exit_code == 0
    assert opens(done.stdout.rstrip("\n"))
    assert "shown only once" in done.stderr
    assert done.stdout.strip() not in done.stderr


def test_key_file_and_list_contain_no_secret(run: Run) -> None:
    key_id, key = made(run, "--tenant", "ops")
    secret = key[12:]

    for shown in (Path(KEYS).read_text(), run("list").stdout, run("list", "--json").stdout):
        assert key_id in shown
        assert secret not in shown


def test_list_shows_owners_and_states_of_keys(run: Run) -> None:
    good, _ = made(run, "--tenant", "team-a", "--expires", "90d")
    ended, _ = made(run, "--tenant", "ops")
    run("revoke", ended)
    rows = json.loads(run("list", "--json").stdout)

    assert [(row["id"], row["tenant"], row["state"]) for row in rows] == [
        (good, "team-a", "good"),
        (ended, "ops", "revoked"),
    ]
    assert rows[0]["expires"] > rows[0]["created"]
    assert rows[0]["revoked"] is None
    table = run("list").stdout
    assert all(word in table for word in (good, "team-a", ended, "revoked", "never"))


def test_list_without_keys_is_empty(run: Run) -> None:
    assert json.loads(run("list", "--json").stdout) == []
    assert "forebay keys create" in run("list").stdout


def test_revoked_key_stays_invalid(run: Run) -> None:
    key_id, key = made(run, "--tenant", "ops")
    assert run("revoke", key_id).exit_code == 0
    before = Path(KEYS).read_bytes()
    assert run("revoke", key_id).exit_code == 0

    assert not opens(key)
    assert Path(KEYS).read_bytes() == before


def test_rotated_key_keeps_its_lifetime(run: Run) -> None:
    key_id, old = made(run, "--tenant", "ops", "--expires", "2h")
    done = run("rotate", key_id)

    assert opens(done.stdout.strip())
    assert not opens(old)
    assert f"{key_id} is revoked" in done.stderr
    first, second = read_keys(Path(KEYS))
    assert first.expires is not None
    assert second.expires is not None
    assert second.tenant == "ops"
    assert second.expires - second.created == pytest.approx(7200)


def test_rotation_with_overlap_keeps_both_keys_valid(run: Run) -> None:
    key_id, old = made(run, "--tenant", "ops", "--expires", "2h")
    done = run("rotate", key_id, "--overlap", "1h")

    assert opens(old)
    assert opens(done.stdout.strip())
    first, second = read_keys(Path(KEYS))
    assert first.expires == second.created + 3600
    run("rotate", second.id, "--overlap", "9d")
    assert read_keys(Path(KEYS))[1].expires == second.expires, "an overlap makes no key last longer"


def test_key_is_rotated_once(run: Run) -> None:
    key_id, _ = made(run, "--tenant", "ops")
    run("rotate", key_id, "--overlap", "1h")
    first, second = read_keys(Path(KEYS))
    assert second.expires is None
    assert f"replaced by key {second.id}: rotate that one" in str(refused(run, "rotate", key_id))
    assert read_keys(Path(KEYS)) == (first, second)
    run("rotate", second.id)
    assert read_keys(Path(KEYS))[2].expires is None


def test_key_file_location_is_configurable(run: Run, tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text(FILE.replace("auth: keys", "auth: keys, keys_file: secrets/k.json"))
    made(run, "--tenant", "ops", "--file", "other.yaml")

    assert len(read_keys(tmp_path / "secrets" / "k.json")) == 1
    assert not Path(KEYS).exists()


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (("create", "--tenant", "nobody"), "there is: team-a, ops", 1),
        (("create", "--tenant", "ops", "--expires", "soon"), "such as 90d, 12h", 2),
        (("create", "--tenant", "ops", "--expires", "0d"), "such as 90d, 12h", 2),
        (("revoke", "aaaaaaaa"), "forebay keys list", 1),
        (("rotate", "aaaaaaaa"), "forebay keys list", 1),
        (("rotate", "aaaaaaaa", "--overlap", "1y"), "--overlap '1y'", 2),
        (("create", "--tenant", "ops", "--file", "none.yaml"), "no such file", 1),
    ],
)
def test_errors_say_what_to_do(run: Run, words: tuple[str, ...], says: str, code: int) -> None:
    error = refused(run, *words)

    assert says in str(error)
    assert error.exit_code == code
    assert not Path(KEYS).exists()


def test_revoked_key_is_not_rotated(run: Run) -> None:
    key_id, _ = made(run, "--tenant", "ops")
    run("revoke", key_id)

    assert "forebay keys create --tenant ops" in str(refused(run, "rotate", key_id))
    assert len(read_keys(Path(KEYS))) == 1


@pytest.mark.parametrize("words", [("list",), ("create", "--tenant", "ops"), ("revoke", "aaaaaaaa")])
def test_corrupt_key_file_is_named_and_kept(run: Run, words: tuple[str, ...]) -> None:
    Path(KEYS).parent.mkdir(parents=True)
    Path(KEYS).write_text("{")

    assert "keys.json: not a file of API keys" in str(refused(run, *words))
    assert Path(KEYS).read_text() == "{"


def test_demo_without_tenants_says_how_to_add_some(run: Run, tmp_path: Path) -> None:
    (tmp_path / "forebay.yaml").unlink()

    assert "gateway.auth: keys" in str(refused(run, "create", "--tenant", "ops"))


@pytest.mark.parametrize(("text", "seconds"), [("45s", 45), ("30m", 1800), ("12h", 43_200), ("90d", 7_776_000)])
def test_times_are_formatted_short(text: str, seconds: int) -> None:
    assert duration_s(text, "--x") == seconds


def test_expiry_out_of_range_creates_no_key(run: Run) -> None:
    assert "100 years" in str(refused(run, "create", "--tenant", "ops", "--expires", "999999999d"))
    assert run("list").exit_code == 0


ADMIN_KEYS = ".forebay/run/test/admin-keys.json"


def caller(key: str) -> Caller | Denied:
    return Admins(read_keys(Path(ADMIN_KEYS))).admit(key.encode(), wall_s())


@pytest.mark.parametrize("role", ["viewer", "operator", "admin"])
def test_an_admin_key_identifies_its_holder_and_is_not_accepted_by_gateways(run: Run, role: str) -> None:
    done = run("create", "--admin", role, "--name", "ada@example.org")
    key = done.stdout.strip()

    assert caller(key) == Caller("ada@example.org", Role[role.upper()])
    assert not Path(KEYS).exists()
    assert "admin: {auth: keys}" in done.stderr
    [row] = json.loads(run("list", "--json").stdout)
    assert (row["name"], row["role"], row["tenant"], row["state"]) == ("ada@example.org", role, None, "good")
    assert f"admin API: {role}" in run("list").stdout


def test_admin_key_name_defaults_to_the_account(run: Run) -> None:
    verdict = caller(run("create", "--admin", "viewer").stdout.strip())

    assert isinstance(verdict, Caller)
    assert verdict.name == account()


def test_admin_key_is_rotated_and_revoked_like_any_other(run: Run) -> None:
    old = run("create", "--admin", "operator", "--name", "bob", "--expires", "2h").stdout.strip()
    new = run("rotate", old[3:11]).stdout.strip()

    assert isinstance(caller(old), Denied)
    assert caller(new) == Caller("bob", Role.OPERATOR)
    run("revoke", new[3:11])
    assert isinstance(caller(new), Denied)
    assert "keys create --admin operator --name bob" in str(refused(run, "rotate", new[3:11]))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("create",), "--tenant NAME"),
        (("create", "--tenant", "ops", "--admin", "viewer"), "--admin ROLE"),
        (("create", "--admin", "emperor"), "viewer, operator, admin"),
        (("create", "--admin", "viewer", "--name", "a b"), "letters, digits"),
    ],
)
def test_invalid_create_options_are_usage_errors(run: Run, words: tuple[str, ...], says: str) -> None:
    error = refused(run, *words)

    assert says in str(error)
    assert error.exit_code == 2
