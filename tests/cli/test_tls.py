"""TLS in the command line: checks of certificates, and trust in those of servers."""

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cli.conftest import Run
from tests.cli.fake_server import FakeServer, fake_server
from tests.net.certificates import CA, issue, write

from forebay.cli.doctor import State, check_certificate, check_port
from forebay.cli.server import trusted
from forebay.cli.settings import FileText, UserError, parse_cluster
from forebay.core.model import TlsSpec
from forebay.net.tls import EXPIRY_WARNING_S
from forebay.obs.clock import wall_s

MODEL = "models: [{name: chat, task: chat, source: synthetic, engine: synthetic}]"
DAY_S = 86_400


def cluster_file(certificate: object, key: object, more: str = "") -> FileText:
    text = (
        f"gateway:\n  tls:\n    certificate: {json.dumps(certificate)}\n    key: {json.dumps(key)}\n{more}{MODEL}\n"
    )
    return FileText("f.yaml", text.encode())


@contextmanager
def https_server(folder: Path) -> Iterator[FakeServer]:
    """The fake server, over TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issue().configure_cert(context)
    CA.cert_pem.write_to_path(folder / "ca.pem")
    with fake_server() as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        yield server


def test_certificate_files_are_checked_only_before_running(tmp_path: Path) -> None:
    spec = write(tmp_path, issue())

    good = parse_cluster(cluster_file(spec.certificate, spec.key), {}, to_run=True)
    assert good.gateway.tls is not None
    assert good.gateway.tls.value() == spec
    assert parse_cluster(cluster_file("missing", "missing"), {}).gateway.tls is not None


def test_certificate_problems_are_listed_with_all_others_and_their_lines(tmp_path: Path) -> None:
    spec, other = write(tmp_path, issue(wall_s() - DAY_S)), tmp_path / "other"
    other.mkdir()
    stranger = write(other, issue())

    for file, lines in (
        (cluster_file(spec.certificate, spec.key), ["line 3  gateway.tls.certificate", "which expired on"]),
        (cluster_file(spec.certificate, stranger.key), ["line 4  gateway.tls.key", "the key of another certificate"]),
        (
            cluster_file("no.pem", "no.key", "admin: {port: 0}\n"),
            ["line 3  gateway.tls.certificate", "line 4  gateway.tls.key", "line 5  admin.port"],
        ),
    ):
        with pytest.raises(UserError) as refusal:
            parse_cluster(file, {}, to_run=True)
        assert [line for line in lines if line not in str(refusal.value)] == []


@pytest.mark.parametrize(
    "tls", ["3", "{}", "{certificate: 3, key: a}", "{certificate: a}", '{certificate: "", key: a}']
)
def test_tls_section_of_the_wrong_type_is_a_problem(tls: str) -> None:
    with pytest.raises(UserError, match=r"gateway\.tls"):
        parse_cluster(FileText("f.yaml", f"gateway: {{tls: {tls}}}\n{MODEL}".encode()), {}, to_run=True)


def test_gateway_section_of_the_wrong_type_is_a_problem() -> None:
    with pytest.raises(UserError, match="gateway: found"):
        parse_cluster(FileText("f.yaml", f"gateway: [1]\n{MODEL}".encode()), {}, to_run=True)


def test_doctor_reports_valid_expiring_expired_and_broken_certificates(tmp_path: Path) -> None:
    now = wall_s()
    states = [
        check_certificate(write(tmp_path, issue(now + left))).state
        for left in (EXPIRY_WARNING_S + DAY_S, EXPIRY_WARNING_S - DAY_S, -DAY_S)
    ]
    (tmp_path / "tls.key").write_bytes(b"")
    broken = check_certificate(TlsSpec(str(tmp_path / "tls.pem"), str(tmp_path / "tls.key")))

    assert states == [State.OK, State.WARN, State.MISSING]
    assert broken.state is State.MISSING
    assert "no PEM private key" in broken.found


def test_config_check_reports_the_certificate(run: Run, tmp_path: Path) -> None:
    spec = write(tmp_path, issue(wall_s() + DAY_S))
    (tmp_path / "forebay.yaml").write_bytes(cluster_file(spec.certificate, spec.key).text)

    done = run("config", "check")

    assert done.returncode == 0, done.stderr
    assert "The certificate expires on" in done.stdout
    assert "renew" in done.stdout


def test_doctor_recognizes_a_gateway_with_tls(tmp_path: Path) -> None:
    with https_server(tmp_path) as server:
        found = check_port("gateway", "127.0.0.1", server.server_address[1], "https")

    assert found.state is State.OK
    assert "by a running Forebay" in found.found


@pytest.mark.slow
def test_chat_and_bench_trust_the_given_ca(run: Run, tmp_path: Path) -> None:
    with https_server(tmp_path) as server:
        url = server.url.replace("http:", "https:")
        ca = str(tmp_path / "ca.pem")
        trusting = run("chat", "hi", "--url", url, "--ca", ca, "--model", "chat")
        suspicious = run("chat", "hi", "--url", url, "--model", "chat")
        loaded = run("bench", "--url", url, "-n", "4", "-c", "2", "--model", "chat", "--json", FOREBAY_CA=ca)

    assert trusting.returncode == 0, trusting.stderr
    assert "Paris" in trusting.stdout
    assert suspicious.returncode == 3
    assert "is not trusted" in suspicious.stderr
    assert "--ca" in suspicious.stderr
    assert loaded.returncode == 0, loaded.stderr
    assert json.loads(loaded.stdout)["url"].startswith("https://")


def test_invalid_ca_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")

    for name in ("ca.pem", "missing.pem"):
        with pytest.raises(UserError, match="--ca"):
            trusted("https://a", tmp_path / name)
    assert trusted("http://a", tmp_path / "missing.pem") is None
