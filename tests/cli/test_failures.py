"""Failures that no command expects: of the system, and text that is not UTF-8. Each is one line and an exit code."""

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import Run
from tests.cli.fake_server import FakeServer

from forebay.cli.main import main

NO_TEXT = "\udcff"
"""The byte 255, as Python decodes an argument."""
NOWHERE = "http://127.0.0.1:1"
LONG = "a" * 300
"""A name that no file system takes."""

Forebay = Callable[..., tuple[int, str]]


@pytest.fixture
def forebay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Forebay:
    """Runs `forebay` in an empty folder; returns its exit code, and what it said on standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    for name in [name for name in os.environ if name.startswith("FOREBAY_")]:
        monkeypatch.delenv(name)

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["forebay", *words])
        with pytest.raises(SystemExit) as end:
            main()
        assert isinstance(end.value.code, int)
        return end.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize("words", [("status",), ("serve", f"{LONG}.gguf"), ("serve", "--repository", LONG)])
def test_file_that_the_system_refuses_is_named(
    forebay: Forebay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("FOREBAY_HOME", str(tmp_path / LONG))
    code, said = forebay(*words)

    assert code == 1
    assert said.startswith("forebay: ")
    assert LONG in said
    assert said.endswith(": File name too long.\n")


@pytest.mark.parametrize("words", [("status", "--url"), ("chat", "hi", "--url"), ("conformance",)])
def test_passwords_in_addresses_are_hidden(forebay: Forebay, words: tuple[str, ...]) -> None:
    code, said = forebay(*words, "http://me:pass@127.0.0.1:1")

    assert code == 3
    assert "http://me:***@127.0.0.1:1" in said
    assert "pass@" not in said


@pytest.mark.parametrize("words", [("status",), ("serve", "m.gguf")])
def test_folder_that_is_gone_is_explained(
    forebay: Forebay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()

    assert forebay(*words) == (1, "forebay: The current folder does not exist any more: change to another one.\n")


@pytest.mark.parametrize("words", [("status",), ("up", "--demo"), ("history",)])
def test_home_that_is_no_text_is_shown(
    forebay: Forebay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    (tmp_path / NO_TEXT).mkdir()
    monkeypatch.chdir(tmp_path / NO_TEXT)
    shown = f"{tmp_path}/\\xff/.forebay"

    assert forebay(*words) == (1, f"forebay: FOREBAY_HOME: {shown} is not UTF-8; set it to another folder.\n")


@pytest.mark.parametrize(
    "words",
    [
        ("drain", NO_TEXT),
        ("scale", "set", "chat", "2", "--why", NO_TEXT),
        ("explain", NO_TEXT, "--folder", "."),
        ("explain", NO_TEXT, "--url", NOWHERE),
        ("history", NO_TEXT),
        ("usage", "--tenant", NO_TEXT, "--url", NOWHERE),
        ("keys", "revoke", NO_TEXT, "--url", NOWHERE),
    ],
    ids=lambda words: ascii(" ".join(words)),
)
def test_argument_that_is_no_text_is_named(forebay: Forebay, words: tuple[str, ...]) -> None:
    assert forebay(*words) == (2, "forebay: \\xff: this argument is not UTF-8.\n")


def test_question_that_is_no_text_is_named(forebay: Forebay, server: FakeServer) -> None:
    told = "forebay: caf\\xe9: this argument is not UTF-8.\n"

    assert forebay("chat", "--url", server.url, "caf\udce9") == (2, told)
    assert forebay("conformance", server.url, "--model", "caf\udce9") == (2, told)


def test_path_need_not_be_text(run: Run, tmp_path: Path) -> None:
    (tmp_path / f"{NO_TEXT}.yaml").write_text("models: [{name: chat, task: chat, source: x, engine: synthetic}]")
    done = run("status", "-f", f"{NO_TEXT}.yaml", FOREBAY_ADMIN__PORT="9")

    assert done.returncode == 3
    assert done.stderr.startswith("forebay: No cluster runs at http://127.0.0.1:9 ")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_standard_input_must_be_text(
    forebay: Forebay, server: FakeServer, monkeypatch: pytest.MonkeyPatch, errors: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8", errors))

    assert forebay("chat", "--url", server.url) == (2, "forebay: Standard input is not UTF-8.\n")


@pytest.mark.parametrize("name", ["stdin", "stdout"])
def test_stream_may_be_closed(
    forebay: Forebay, server: FakeServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(sys, name, None)
    words = ("chat", "--url", server.url) if name == "stdin" else ("status", "--url", NOWHERE)
    code, said = forebay(*words)
    getattr(sys, name).close()

    assert (code, said[:20]) == ((2, "forebay: No prompt: ") if name == "stdin" else (3, "forebay: No cluster "))


@pytest.mark.parametrize("words", [("status",), ("chat", "hi"), ("bench",)])
def test_url_with_an_impossible_host_is_a_usage_error(forebay: Forebay, words: tuple[str, ...]) -> None:
    code, said = forebay(*words, "--url", "http://a..b")

    assert code == 2
    assert "found 'http://a..b" in said
    assert said.endswith("; a..b is not the name of a host\n")
