"""`forebay registry` and `forebay history`: input and output, and how cluster files refer to the registry."""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from onnx.helper import make_graph, make_model
from typer.testing import CliRunner

from forebay.cli.main import app
from forebay.cli.registry import command
from forebay.cli.registry.artifacts import prepare_models
from forebay.cli.registry.opening import forget
from forebay.cli.settings import UserError, load_cluster, read_file
from forebay.control.plan import Artifact
from forebay.registry.catalogue import Actor

FILE = """\
registry: {approvals_min: 1}
models: [{name: embed, task: embed, source: "registry:embed@champion"}]
"""
MODEL = make_model(make_graph([], "nothing", [], [])).SerializeToString()

OPENSSF = Path(__file__).parents[2] / "registry" / "openssf"
Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `forebay` in this process as somebody, in a folder with a cluster file and a model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FOREBAY_HOME", raising=False)
    (tmp_path / "forebay.yaml").write_text(FILE)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.onnx").write_bytes(MODEL)
    (tmp_path / "model" / "tokenizer.json").write_bytes(b"{}")

    def run_as(who: str, *words: str) -> Result:
        monkeypatch.setattr(command, "_actor", lambda: Actor(who))
        return CliRunner().invoke(app, words)

    return run_as


def said(done: Result) -> str:
    assert done.exit_code == 0, done.output + str(done.exception)
    return done.output


def refused(done: Result) -> UserError:
    assert isinstance(done.exception, UserError), done.output
    return done.exception


def added(run: Run, *words: str) -> str:
    done = run("ann", "registry", "add", "embed", "model", "--json", *words)
    assert done.exit_code == 0, done.output
    listed: dict[str, Any] = json.loads(done.stdout)
    return str(listed["revision"]["id"])


def prepared() -> Artifact:
    cluster = load_cluster(read_file(None), [], {})
    return prepare_models(cluster, Path(".forebay"), lambda _: lambda *_: None)["embed"]


def test_model_is_added_approved_aliased_and_served(run: Run) -> None:
    done = said(run("ann", "registry", "add", "embed", "model", "--set", "engine.threads=2", "--meta", "licence=mit"))
    id = json.loads(run("ann", "registry", "list", "--json").stdout)[0]["revision"]["id"]
    assert f"embed@{id} is pending: 1 approval of 1 missing, by someone other than ann." in done
    assert f"forebay registry approve embed@{id}" in done
    said(run("ann", "registry", "alias", f"embed@{id}", "champion"))
    with pytest.raises(UserError, match=f"model embed: embed@{id}: is pending"):
        prepared()
    assert "someone else must approve it" in str(refused(run("ann", "registry", "approve", f"embed@{id}")))
    assert "is approved: approved by bob" in said(
        run("bob", "registry", "approve", "embed@champion", "--reason", "it ranks well")
    )
    artifact = prepared()
    assert (artifact.path / "model.onnx").read_bytes() == MODEL
    assert (artifact.engine, artifact.settings["threads"]) == ("onnx", 2)
    shown = said(run("ann", "registry", "show", "embed@champion"))
    assert all(text in shown for text in ("approved by bob", "champion", "licence", "mit", "threads=2"))
    said(run("cid", "registry", "reject", "embed@champion", "--reason", "it is biased"))
    with pytest.raises(UserError, match="rejected by cid: it is biased"):
        prepared()
    told = said(run("ann", "history"))
    assert [line.split()[3:5] for line in told.splitlines()[1:]] == [
        ["ann", "revision.add"],
        ["ann", "alias.set"],
        ["bob", "revision.approve"],
        ["cid", "revision.reject"],
    ]
    assert "it ranks well" in told
    assert len(json.loads(run("ann", "history", "model/embed", "--last", "2", "--json").stdout)) == 2


def test_modified_model_is_detected_and_never_served(run: Run) -> None:
    id = added(run)
    said(run("ann", "registry", "alias", f"embed@{id}", "champion"))
    said(run("bob", "registry", "approve", f"embed@{id}"))
    assert "Everything is unmodified." in said(run("ann", "registry", "verify"))
    (file,) = Path(".forebay/registry/trees").glob("*/model.onnx")
    file.chmod(0o644)
    file.write_bytes(MODEL.replace(b"nothing", b"n0thing"))
    done = run("ann", "registry", "verify", "--json")
    assert done.exit_code == 1
    assert [text.partition(" its SHA-256")[0] for text in json.loads(done.stdout)["wrong"]] == [
        f"embed@{id}: model.onnx:"
    ]
    assert "model.onnx" in run("ann", "registry", "verify").output
    with pytest.raises(UserError, match=r"model\.onnx: its SHA-256"):
        prepared()


def test_conflicting_settings_of_the_cluster_file_are_rejected(run: Run) -> None:
    id = added(run)
    said(run("bob", "registry", "approve", f"embed@{id}"))
    for models, why in [
        (f'{{name: embed, task: chat, source: "registry:embed@{id}"}}', "is registered for `task: embed`"),
        (f'{{name: embed, task: embed, engine: onnx, source: "registry:embed@{id}"}}', None),
        (f'{{name: embed, task: embed, engine: synthetic, source: "registry:embed@{id}"}}', "leave out `engine`"),
        (
            f'{{name: embed, task: embed, engine: {{name: onnx, threads: 7}}, source: "registry:embed@{id}"}}',
            "leave out `engine`",
        ),
        ('{name: embed, task: embed, source: "registry:embed"}', "registry:MODEL@REVISION"),
        ('{name: embed, task: embed, source: "registry:embed@nobody"}', f"there is: {id}"),
    ]:
        Path("forebay.yaml").write_text(f"registry: {{approvals_min: 1}}\nmodels: [{models}]\n")
        if why is None:
            prepared()
        else:
            with pytest.raises(UserError, match=why):
                prepared()


def test_publishers_require_a_signature(run: Run) -> None:
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", "key.pem"], check=True)
    subprocess.run(["openssl", "pkey", "-in", "key.pem", "-pubout", "-out", "key.pub"], check=True)
    Path("forebay.yaml").write_text(FILE.replace("approvals_min: 1", "publishers: [key.pub]"))
    said(run("ann", "registry", "alias", f"embed@{added(run)}", "champion"))
    with pytest.raises(UserError, match="has no signature of a key"):
        prepared()
    assert "not a private Ed25519 key" in str(
        refused(run("ann", "registry", "sign", "embed@champion", "--key", "key.pub"))
    )
    assert "is signed with the key" in said(run("ann", "registry", "sign", "embed@champion", "--key", "key.pem"))
    assert prepared().engine == "onnx"
    assert "no one" not in said(run("ann", "registry", "show", "embed@champion"))


def test_openssf_signature_is_accepted(run: Run) -> None:
    public, bundle = OPENSSF / "p256.pub", OPENSSF / "p256.sig"
    Path("forebay.yaml").write_text(FILE.replace("approvals_min: 1", f"publishers: [{public}]"))
    words = ("registry", "add", "embed", str(OPENSSF / "model"), "--engine", "synthetic", "--task", "embed", "--json")
    id = json.loads(run("ann", *words).stdout)["revision"]["id"]
    said(run("ann", "registry", "alias", f"embed@{id}", "champion"))
    with pytest.raises(UserError, match="has no signature of a key"):
        prepared()
    signing = ("registry", "sign", "embed@champion")
    assert "not made by a key in `registry.publishers`" in str(
        refused(run("ann", *signing, "--bundle", str(OPENSSF / "p384.sig")))
    )
    assert "is signed with the key" in said(run("ann", *signing, "--bundle", str(bundle)))
    assert prepared().engine == "synthetic"


def test_same_model_twice_is_one_revision_and_gc_frees_garbage(run: Run) -> None:
    assert added(run) == added(run)
    assert added(run, "--set", "engine.threads=3") != added(run)
    stray = Path(".forebay/registry/blobs/aa")
    stray.mkdir()
    (stray / "a").write_bytes(b"x" * 200_000)
    assert said(run("ann", "registry", "gc")) == "0.2 MB freed.\n"
    table = said(run("ann", "registry", "list", "embed"))
    assert table.count("pending") == 2
    assert "Nothing is registered yet" in said(run("ann", "registry", "list", "other"))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["registry", "approve", "embed"], "such as chat@champion; `forebay registry list embed` shows"),
        (["registry", "add", "embed", "model", "--meta", "x"], "expected KEY=VALUE"),
        (["registry", "add", "embed", "model", "--task", "sing"], "expected chat, embed, tensor"),
        (["registry", "add", "embed", "nowhere"], "no such file or folder"),
        (["registry", "add", "embed", "forebay.yaml", "--task", "embed"], "forebay.yaml"),
        (["registry", "show", "embed@x"], "no such revision"),
        (["registry", "sign", "embed@x"], "Expected either --key FILE or --bundle FILE"),
        (
            ["registry", "sign", "embed@x", "--key", "a", "--bundle", "b"],
            "Expected either --key FILE or --bundle FILE",
        ),
        (["registry", "sign", "embed@x", "--bundle", "nowhere"], "nowhere: cannot be read"),
        (["registry", "sign", "embed@x", "--bundle", "b", "--files", "c"], "--files needs --key"),
    ],
)
def test_errors_are_explained(run: Run, words: list[str], why: str) -> None:
    assert why in str(refused(run("ann", *words)))


@pytest.mark.parametrize(
    ("store", "allowed"),
    [
        ("mysql://x", "sqlite:///PATH or postgresql://USER@HOST/NAME"),
        ("postgresql://ann:secret@db/forebay", "a URL without a password"),
        ("postgresql://ann@db/forebay?password=secret", "a URL without a password"),
    ],
)
def test_invalid_store_url_or_one_with_a_password_is_rejected(run: Run, store: str, allowed: str) -> None:
    Path("forebay.yaml").write_text(f'store: "{store}"\n{FILE}')
    error = str(refused(run("ann", "registry", "list")))
    assert allowed in error
    assert "secret" not in error


def test_encrypted_model_is_decrypted_only_in_memory_until_the_cluster_stops(run: Run) -> None:
    key = base64.b64encode(os.urandom(32)).decode()
    Path("wrap.key").write_text(f"{key}\n")
    memory = Path("/dev/shm") / f"forebay-test-{os.getpid()}"
    Path("forebay.yaml").write_text(
        FILE.replace("{approvals_min: 1}", f"{{encryption: {{key_file: wrap.key}}, memory_folder: {memory}}}")
    )
    said(run("ann", "registry", "alias", f"embed@{added(run)}", "champion"))
    try:
        artifact = prepared()
        assert artifact.path.is_relative_to(memory)
        assert (artifact.path / "model.onnx").read_bytes() == MODEL
        assert not [
            each for each in Path(".forebay").rglob("*") if each.is_file() and b"nothing" in each.read_bytes()
        ]
        forget(load_cluster(read_file(None), [], {}))
        assert not artifact.path.exists()
    finally:
        shutil.rmtree(memory)
    Path("forebay.yaml").write_text(FILE.replace("approvals_min: 1", "encryption: {}"))
    assert "`key_file` or `command`" in str(refused(run("ann", "registry", "list")))
