"""Commands that start nothing: help, version, schema, config check, status without a cluster."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import jsonschema
import msgspec
import pytest
import yaml
from rich.console import Console
from tests.cli.conftest import Run

from forebay import __version__
from forebay.cli.main import main
from forebay.cli.settings import INTERRUPTED, demo_file
from forebay.cli.view.status import view
from forebay.control.status import Status

pytestmark = pytest.mark.slow
COMMANDS = (
    "up",
    "serve",
    "status",
    "reload",
    "chat",
    "bench",
    "simulate",
    "doctor",
    "schema",
    "config check",
    "deploy",
    "apply",
    "rollout status",
    "rollout pause",
    "scale status",
    "scale set",
    "keys create",
    "keys list",
    "keys revoke",
    "keys rotate",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run: Run, command: str) -> None:
    done = run(*command.split(), "--help")

    assert done.returncode == 0
    assert "Usage:" in done.stdout


def test_help_imports_no_heavy_modules(run: Run) -> None:
    done = run("--help", PYTHONPROFILEIMPORTTIME="1")

    assert " typer\n" in done.stderr, "the interpreter lists what it imports"
    for heavy in ("pydantic", "httpx", "uvloop", "openvino_genai", "matplotlib", "starlette"):
        assert f" {heavy}\n" not in done.stderr


def test_the_version_is_printed(run: Run) -> None:
    assert run("--version").stdout == f"forebay {__version__}\n"


def test_schema_accepts_the_demo_and_rejects_invalid_files(run: Run) -> None:
    schema = json.loads(run("schema").stdout)
    jsonschema.Draft202012Validator.check_schema(schema)

    jsonschema.validate(yaml.safe_load(demo_file().text), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"models": [], "gatway": {}}, schema)


def test_config_check_lists_every_problem_with_line_and_path(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("gateway:\n  port: 0\n  prot: 1\nmodels:\n  - {name: Chat!, task: x}\n")
    done = run("config", "check", "bad.yaml")

    assert done.returncode == 1
    assert done.stdout == ""
    assert "5 problems; nothing was started" in done.stderr
    for words in ("line 2", "gateway.port", "line 3", "gateway.prot", "models[0].name", "models[0].task", "source"):
        assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_config_check_accepts_a_valid_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "forebay.yaml").write_bytes(demo_file().text)
    done = run("config", "check")

    assert done.returncode == 0
    assert "valid" in done.stdout
    assert "chat (chat, 2 replicas)" in done.stdout


def test_config_check_reports_missing_local_sources(run: Run, tmp_path: Path) -> None:
    (tmp_path / "here.gguf").touch()
    sources = {"a": "here.gguf", "b": "gone.gguf", "c": "package:", "d": "registry:chat@r1", "e": "registry:chat"}
    models = [{"name": name, "task": "chat", "source": source} for name, source in sources.items()]
    models.append({"name": "f", "task": "chat", "source": "synthetic", "engine": "synthetic"})
    (tmp_path / "forebay.yaml").write_text(json.dumps({"models": models}))
    done = run("config", "check")

    assert done.returncode == 0
    told = [line.partition(": ")[::2] for line in done.stdout.splitlines()[1:]]
    assert [name for name, _ in told] == [f"{name} cannot start on this machine" for name in "bce"]
    for (_, text), words in zip(told, ("gone.gguf: no such file", "not of the form", "not of the form"), strict=True):
        assert words in text


def test_config_check_accepts_the_file_options_of_other_commands(run: Run, tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_bytes(demo_file().text)
    for words in (("-f", "other.yaml"), ("other.yaml",), ("--file", "other.yaml", "--set", "gateway.port=9000")):
        assert run("config", "check", *words).stdout.startswith("other.yaml: valid.")


def test_invalid_cluster_file_starts_nothing(run: Run, tmp_path: Path) -> None:
    (tmp_path / "forebay.yaml").write_text("models: 5\n")
    done = run("up")

    assert done.returncode == 1
    assert "nothing was started" in done.stderr
    assert not (tmp_path / ".forebay").exists()


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (("up", "-f", "nowhere.yaml"), "no such file", 1),
        (("up", "--demo", "-f", "x.yaml"), "cannot be combined", 2),
        (("up", "--set", "nonsense"), "PATH=VALUE", 2),
        (("config", "check", "-f", "x.yaml", "y.yaml"), "give only one", 2),
        (("config", "check", "-f", "nowhere.yaml"), "nowhere.yaml: no such file", 1),
        (("rollout", "status", "-f", "nowhere.yaml"), "nowhere.yaml: no such file", 1),
        (("serve", "nowhere.gguf"), "no such file", 1),
        (("serve", "x", "--task", "paint"), "allowed: chat, embed", 2),
        (("status", "--url", "http://127.0.0.1:9"), "forebay up", 3),
        (("status", "--json", "--url", "http://127.0.0.1:9"), "forebay up", 3),
        (("frobnicate",), "No such command", 2),
    ],
)
def test_usage_errors_have_a_message_and_an_exit_code(run: Run, words: tuple[str, ...], says: str, code: int) -> None:
    done = run(*words)

    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["keys list --json", "schema", "--help"])
def test_reader_that_leaves_early_is_no_error(tmp_path: Path, command: str) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "wb") as pipe:
        assert ended(tmp_path, command, pipe) == (1, "")


@pytest.mark.parametrize("command", ["keys list --json", "schema", "usage --json"])
def test_output_on_a_full_disk_is_one_line_of_error(tmp_path: Path, command: str) -> None:
    (tmp_path / ".forebay/run/forebay/records").mkdir(parents=True)
    with open("/dev/full", "wb") as full:
        said = "forebay: the output cannot be written: No space left on device.\n"
        assert ended(tmp_path, command, full) == (1, said)


def ended(folder: Path, command: str, stdout: IO[bytes]) -> tuple[int, str]:
    """The exit code, and what was said on standard error, with a buffered standard output."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("FOREBAY_") and k != "PYTHONUNBUFFERED"}
    words = [sys.executable, "-m", "forebay.cli.main", *command.split()]
    done = subprocess.run(
        words, cwd=folder, env=environ, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    return done.returncode, done.stderr


class Terminal(io.StringIO):
    """What is written to it, as if somebody looked."""

    def isatty(self) -> bool:
        return True


def test_messages_are_wrapped_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    (tmp_path / "f.yaml").write_text("bogus: 1\nmodels: [{name: chat, task: chat, source: x}]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "argv", ["forebay", "config", "check", "f.yaml"])
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit):
        main()
    first, *others = screen.getvalue().splitlines()
    assert first == "forebay: f.yaml: 1 problem; nothing was started."
    assert " ".join(line.strip() for line in others).startswith("line 1  bogus: found an unknown key; allowed: the")
    assert len(others) > 1
    assert max(len(line) for line in others) <= 60


UNIT = {
    "id": "gateway-0", "generation": 1, "pid": 7, "url": "http://127.0.0.1:8080", "state": "ready", "why": "",
    "since": 1.0, "restarts": 0, "starts_again_in_s": None, "last_words": "",
}  # fmt: skip
REPLICA = {
    **UNIT, "id": "chat-0", "model": "chat", "revision": "0123456789ab", "engine_pid": 8, "engine_restarts": 0,
    "in_flight": 3, "running": 3, "waiting": 0, "capacity": 32, "kv_used_tokens": 1000, "kv_total_tokens": 4000,
    "batch_fill": 0.5,
}  # fmt: skip
BROKEN = {
    **REPLICA, "id": "chat-1", "state": "quarantined", "pid": 0, "url": "", "why": "it ended with code 1",
    "starts_again_in_s": 4.5, "restarts": 9, "last_words": "Error: [no] such file",
}  # fmt: skip
MODEL = {
    "name": "chat", "task": "chat", "engine": "openvino", "source": "x", "revision": "0123456789ab", "slo": {},
    "ready": 1, "wanted": 2, "replicas": [REPLICA, BROKEN], "trouble": "m.gguf: it has another SHA-256",
}  # fmt: skip
STATUS = {
    "cluster": "demo", "version": "1", "pid": 6, "ready": True, "phase": "run", "trouble": "",
    "gateway_url": "http://127.0.0.1:8080", "gateways": [UNIT], "models": [MODEL],
}  # fmt: skip


def test_status_table_fits_a_terminal_and_explains_unready_replicas() -> None:
    console = Console(width=80, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as captured:
        console.print(view(msgspec.convert(STATUS, Status)))
    shown = captured.get()

    for words in ("1/2 ready", "chat-0", "3/32", "25%", "127.0.0.1:8080", "0123456789ab", "quarantined", "gateway-0"):
        assert words in shown
    assert "it ended with code 1; restarts in 4.5 s" in shown
    assert "chat: m.gguf: it has another SHA-256" in shown
    assert "last log lines: Error: [no] such file" in shown
    assert "…" not in shown
    assert "gRPC" not in shown


def test_status_table_shows_the_grpc_address_of_a_replica() -> None:
    spoken = {**STATUS, "models": [{**MODEL, "replicas": [{**REPLICA, "grpc_port": 9100}]}]}
    console = Console(width=100, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as captured:
        console.print(view(msgspec.convert(spoken, Status)))

    assert "127.0.0.1:8080 (gRPC 9100)" in captured.get()


FINALIZED = """
import signal, time
from forebay.cli import main

class Last:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def app():
    Last()
    print("interrupted in vain", flush=True)
    time.sleep(60)

main.app = app
main.main()
"""


def test_ctrl_c_while_an_object_is_finalized_is_not_lost() -> None:
    ended = subprocess.run([sys.executable, "-c", FINALIZED], capture_output=True, text=True, timeout=50, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (INTERRUPTED, "interrupted in vain\n", "")
