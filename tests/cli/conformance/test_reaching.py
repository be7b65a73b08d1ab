"""`forebay conformance` reaches servers over HTTPS and those that require a key, and says why it does not."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
import typer
from tests.cli.conformance.honest import DOCUMENTS, answered
from tests.net.certificates import CA, issue, write

from forebay.cli.conformance import command, server
from forebay.cli.settings import NOT_REACHED, WRONG_USAGE, UserError

KEY = "Bearer k"


class Handler(BaseHTTPRequestHandler):
    """Answers those who send the key, and everyone who asks what it is."""

    protocol_version = "HTTP/1.1"

    asked: ClassVar[list[str]] = []

    def _answer(self) -> None:
        self.asked.append(self.path)
        content = self.rfile.read(int(self.headers.get("content-length", "0")))
        asked = httpx.Request(
            self.command, f"http://server{self.path}", headers=[*self.headers.items()], content=content
        )
        known = self.path == "/v2" or self.headers["authorization"] == KEY
        answer = answered(asked) if known else httpx.Response(401, json={"error": "a key is required"})
        self.send_response(answer.status_code)
        for name, value in {"content-length": str(len(answer.content)), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.content)

    do_GET = do_POST = _answer  # noqa: N815 - the base class calls these

    def log_message(self, *words: object) -> None:
        """Say nothing."""


@contextmanager
def honest_server(tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """HOST:PORT of a server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        if tls is not None:
            http.socket = tls.wrap_socket(http.socket, server_side=True)
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{http.server_address[1]}"
        finally:
            http.shutdown()
            thread.join()


def _exit_code(url: str, **options: str | Path) -> int:
    with pytest.raises(typer.Exit) as ended:
        command.conformance(url, only="any/metadata", **options)  # type: ignore[arg-type]  # one of its options
    return ended.value.exit_code


def test_key_is_sent_and_required() -> None:
    with honest_server() as address:
        assert _exit_code(f"http://{address}", api_key="k") == 0
        for options in ({}, {"api_key": "other"}, {"model": ["m"]}):
            with pytest.raises(UserError, match=r"HTTP 401, .*a key is required.*\n.*valid key with --api-key"):
                command.conformance(f"http://{address}", **options)


def test_certificate_of_a_given_ca_is_trusted(tmp_path: Path) -> None:
    spec = write(tmp_path, issue())
    CA.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(spec.certificate, spec.key)
    with honest_server(context) as address:
        assert _exit_code(f"https://{address}", api_key="k", ca=tmp_path / "ca.pem") == 0
        with pytest.raises(UserError, match=r"certificate of https://.* is not trusted .*--ca") as refused:
            command.conformance(f"https://{address}", api_key="k")
    assert refused.value.exit_code == NOT_REACHED


@pytest.mark.parametrize("form", ["{}", "http://{}/", "http://{}/v2", "http://{}/v2/"])
def test_url_may_lack_its_scheme_or_name_the_protocol(form: str) -> None:
    with honest_server() as address:
        assert _exit_code(form.format(address), api_key="k") == 0


def test_silent_server_is_told_from_a_closed_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TIMEOUT_S", 0.2)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as silent:  # nobody accepts
        url = f"http://127.0.0.1:{silent.server_address[1]}"
        with pytest.raises(UserError, match="has accepted the connection, and does not answer"):
            command.conformance(url)
    with pytest.raises(UserError, match="Nothing answers at") as refused:
        command.conformance(url)
    assert refused.value.exit_code == NOT_REACHED


@pytest.mark.parametrize("option", ["url", "grpc", "metrics"])
def test_address_of_the_wrong_form_is_named(option: str) -> None:
    addresses = {"url": "http://127.0.0.1:9", option: "grpc://127.0.0.1:9"}
    with pytest.raises(UserError, match=r"(URL|--grpc|--metrics): found 'grpc://127\.0\.0\.1:9'") as refused:
        command.conformance(**addresses)
    assert refused.value.exit_code == WRONG_USAGE


def test_models_of_an_earlier_run_are_unloaded_before_the_suite_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"name": name, "state": state} for name, state in {"m": "READY", "plain": "READY", "free": ""}.items()]
    monkeypatch.setitem(DOCUMENTS, "/v2/repository/index", rows)
    Handler.asked.clear()
    with honest_server() as address, pytest.raises(typer.Exit):
        command.conformance(f"http://{address}", api_key="k", suite=True, only="control/index")
    unloads = [path for path in Handler.asked if path.endswith("/unload")]
    assert unloads == ["/v2/repository/models/plain/unload"]
