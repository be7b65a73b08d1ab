"""Which cluster a command addresses: by option, environment, file, or the running one, in this order."""

import os
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from forebay.cli.records.reading import records_folder
from forebay.cli.running.address import Address, Holder, admin_address, admin_url, running
from forebay.cli.settings import UserError
from forebay.core.cluster import Cluster
from forebay.providers.processes import Identity, identify

MODELS = [{"name": "chat", "task": "chat", "source": "x", "engine": "synthetic"}]
FILE = """\
name: {name}
admin: {{port: {port}}}
models: [{{name: chat, task: chat, source: x, engine: synthetic}}]
"""
NOBODY = Identity(2**22 + 1, 1, "")
"""Its pid is larger than any."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, to run commands in."""
    monkeypatch.chdir(tmp_path)
    for name in ("FOREBAY_HOME", "FOREBAY_ADMIN_URL", "FOREBAY_ADMIN__PORT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def this() -> Identity:
    found = identify(os.getpid())
    assert found is not None
    return found


def runs(name: str, url: str, process: Identity | None = None) -> None:
    """As if a process, this one by default, ran a cluster."""
    path = Path(".forebay", "run", name, "lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(Holder(process or this(), 1.0, url)))


def test_address_sources_have_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert admin_address(None, None) == Address("http://127.0.0.1:8081", "the default")
    runs("demo", "http://127.0.0.1:9000")
    assert admin_address(None, None) == Address("http://127.0.0.1:9000", "demo")
    Path("forebay.yaml").write_text(FILE.format(name="own", port=9001))
    assert admin_address(None, None) == Address("http://127.0.0.1:9001", "forebay.yaml")
    Path("other.yaml").write_text(FILE.format(name="other", port=9002))
    assert admin_address(None, Path("other.yaml")) == Address("http://127.0.0.1:9002", "other.yaml")
    monkeypatch.setenv("FOREBAY_ADMIN_URL", "https://elsewhere/")
    assert admin_address(None, Path("other.yaml")) == Address("https://elsewhere", "FOREBAY_ADMIN_URL")
    assert admin_address("http://there:1/", Path("nowhere.yaml")) == Address("http://there:1", "--url")


def test_running_address_takes_precedence_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been started with `--set admin.port=9009`, or its file was changed since."""
    Path("forebay.yaml").write_text(FILE.format(name="own", port=9001))
    runs("own", "http://127.0.0.1:9009")
    assert admin_address(None, None).url == "http://127.0.0.1:9009"
    runs("own", "http://127.0.0.1:9009", process=NOBODY)
    assert admin_address(None, None).url == "http://127.0.0.1:9001"
    monkeypatch.setenv("FOREBAY_ADMIN__PORT", "9003")
    assert admin_address(None, None).url == "http://127.0.0.1:9003"


def test_an_invalid_cluster_file_is_an_error_only_if_named() -> None:
    Path("forebay.yaml").write_text("models: 5\n")
    assert admin_address(None, None).origin == "the default, as forebay.yaml is invalid: `forebay config check`"
    runs("own", "http://127.0.0.1:9009")
    assert admin_address(None, None).url == "http://127.0.0.1:9009"
    with pytest.raises(UserError, match="1 problem; no request was sent"):
        admin_address(None, Path("forebay.yaml"))


def test_several_running_clusters_require_a_choice() -> None:
    runs("one", "http://127.0.0.1:9001")
    runs("two", "http://127.0.0.1:9002")
    with pytest.raises(
        UserError, match=r"(?s)Several clusters run here.*one: --url http://127\.0\.0\.1:9001"
    ) as refusal:
        admin_address(None, None)
    assert refusal.value.exit_code == 2
    Path("forebay.yaml").write_text(FILE.format(name="two", port=1))
    assert admin_address(None, None).url == "http://127.0.0.1:9002"


def test_only_running_clusters_are_found(folder: Path) -> None:
    runs("gone", "http://127.0.0.1:9001", process=NOBODY)
    runs("reused", "http://127.0.0.1:9004", process=replace(this(), ticks=1))
    runs("older", "")
    runs("broken", "http://127.0.0.1:9002")
    Path(".forebay/run/broken/lock").write_bytes(b"{")
    runs("there", "http://127.0.0.1:9003")
    assert running(folder / ".forebay") == {"there": "http://127.0.0.1:9003"}


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8081"),
        ("0.0.0.0", "http://127.0.0.1:8081"),
        ("10.0.0.7", "http://10.0.0.7:8081"),
        ("::", "http://[::1]:8081"),
        ("::1", "http://[::1]:8081"),
        ("localhost", "http://localhost:8081"),
    ],
)
def test_wildcard_listen_address_becomes_loopback(host: str, url: str) -> None:
    admin = {"host": host, "auth": "keys"}
    assert admin_url(Cluster.model_validate({"admin": admin, "models": MODELS})) == url


def test_records_of_the_running_cluster_are_preferred() -> None:
    for name in ("one", "two", "three"):
        Path(".forebay/run", name, "records").mkdir(parents=True)
    with pytest.raises(UserError, match=r"(?s)Several clusters have records.*one.*three.*two"):
        records_folder(None)
    runs("two", "http://127.0.0.1:9002")
    assert records_folder(None).parent.name == "two"
    runs("three", "http://127.0.0.1:9003")
    with pytest.raises(UserError, match=r"(?s)Several clusters have records.*three.*two") as refusal:
        records_folder(None)
    assert "one/records" not in str(refusal.value)
