"""`forebay chat`: output for good and bad answers."""

import pytest
from tests.cli.conftest import Run
from tests.cli.fake_server import FakeServer
from typer.testing import CliRunner

from forebay.cli.main import app
from forebay.cli.settings import UserError

TEXT = "The capital of France is Paris."


def test_answer_is_printed_unchanged(run: Run, server: FakeServer) -> None:
    done = run("chat", "--url", server.url, "What is the capital of France?")

    assert done.stdout == f"{TEXT}\n"
    assert done.stderr == ""
    assert done.returncode == 0


@pytest.mark.slow
def test_question_is_read_from_stdin_and_system_message_goes_first(run: Run, server: FakeServer) -> None:
    server.documents.clear()
    done = run(
        "chat",
        "--system",
        "Be brief.",
        "--max-tokens",
        "9",
        "--temperature",
        "0",
        stdin="What?\n",
        FOREBAY_URL=server.url,
    )

    assert done.stdout == f"{TEXT}\n"
    (document,) = server.documents
    assert document["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What?"},
    ]
    assert document["max_tokens"] == 9
    assert document["temperature"] == 0
    assert document["model"] == "chat"


@pytest.mark.slow
def test_api_key_is_sent(run: Run, server: FakeServer) -> None:
    server.authorizations.clear()
    run("chat", "--url", f"{server.url}/v1", "hi", FOREBAY_API_KEY="secret")

    assert server.authorizations == ["Bearer secret"]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("refuse", "No answer: The waiting queue is full. [queue_full] (HTTP 429; retry after 7 s)"),
        pytest.param("cut", "Incomplete: the answer was interrupted", marks=pytest.mark.slow),
        pytest.param("error-event", "Incomplete: The replica was lost. [stream_interrupted]", marks=pytest.mark.slow),
    ],
)
def test_a_failure_is_one_readable_line(run: Run, server: FakeServer, model: str, says: str) -> None:
    done = run("chat", "--url", server.url, "--model", model, "hi")

    assert done.returncode == 1
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_control_characters_of_a_model_are_not_printed(run: Run, server: FakeServer) -> None:
    assert "\x1b" not in run("chat", "--url", server.url, "--model", "rude", "hi").stdout


@pytest.mark.slow
def test_unknown_model_error_lists_the_models(run: Run, server: FakeServer) -> None:
    done = run("chat", "--url", server.url, "--model", "gpt", "hi")

    assert done.returncode == 1
    assert "There is no model 'gpt'" in done.stderr
    assert "chat, cut" in done.stderr


def test_error_without_a_server_says_how_to_start(run: Run) -> None:
    done = run("chat", "hi", FOREBAY_URL="http://127.0.0.1:9")

    assert done.returncode == 3
    assert "forebay up" in done.stderr


@pytest.mark.slow
def test_empty_question_is_a_usage_error(run: Run, server: FakeServer) -> None:
    done = run("chat", "--url", server.url, stdin="\n")

    assert done.returncode == 2
    assert "No prompt" in done.stderr


def refused(*words: str) -> UserError:
    done = CliRunner().invoke(app, ["chat", "hi", *words])
    assert isinstance(done.exception, UserError), done.output
    return done.exception


def test_missing_key_is_explained(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOREBAY_API_KEY", raising=False)
    server.key = "secret"
    try:
        error = refused("--url", server.url)
    finally:
        server.key = None

    assert "[invalid_api_key] (HTTP 401)" in str(error)
    assert "--api-key" in str(error)
    assert error.exit_code == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:80x", "ftp://127.0.0.1", "http://", "http://[::1"])
def test_unusable_url_is_a_usage_error(url: str) -> None:
    error = refused("--url", url)

    assert url in str(error)
    assert error.exit_code == 2


@pytest.mark.parametrize(("before", "after"), [("", ""), ("", "/v1/"), ("http://", "/")])
def test_url_may_lack_the_scheme_or_end_with_a_slash(server: FakeServer, before: str, after: str) -> None:
    url = before + server.url.removeprefix("http://") + after
    done = CliRunner().invoke(app, ["chat", "--url", url, "hi"])

    assert (done.exit_code, done.stdout) == (0, f"{TEXT}\n")


@pytest.mark.parametrize("key", ["ключ", "two\nlines"])
def test_key_that_no_header_can_hold_is_a_usage_error(server: FakeServer, key: str) -> None:
    error = refused("--url", server.url, "--api-key", key)

    assert "printable ASCII" in str(error)
    assert error.exit_code == 2
