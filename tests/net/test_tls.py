"""HTTPS: valid and invalid certificates, their renewal under open connections, and clients that misbehave in TLS."""

import asyncio
import io
import json
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.net.certificates import CA, chain, der, issue, seen, tls_peer, trusting, write
from tests.net.rig import PATIENCE_S, Log, Peer, Told, echo, get, peer, pooling, post, run, serving, until

from forebay.core.errors import Code
from forebay.core.model import Limits, TlsSpec
from forebay.net import connection, tls
from forebay.net.server import Exchange, Handler, HttpServer
from forebay.net.tls import EXPIRY_WARNING_S, BadPair, CertificateReloader, load
from forebay.obs import log
from forebay.obs.metrics import Metrics

NOW_S = datetime(2026, 11, 1, tzinfo=UTC).timestamp()
SWEEPING = 0.04
"""As an idle timeout: the server sweeps a hundred times a second."""


class Watched:
    """A renewal, and what it says."""

    def __init__(self, spec: TlsSpec) -> None:
        self._lines = io.StringIO()
        self.metrics = Metrics()
        self.now = float(NOW_S)
        self.renewal = CertificateReloader(spec, log.configure(self._lines), self.metrics, wall=lambda: self.now)
        self.context = self.renewal.start()

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.renewal.look()

    def said(self) -> list[dict[str, Any]]:
        """Warnings so far."""
        lines = [json.loads(line) for line in self._lines.getvalue().splitlines()]
        return [line for line in lines if line["level"] == "warning"]

    def reloads(self, outcome: str) -> float:
        return self.metrics.counter("tls_reloads_total", outcome).value


def https(folder: Path, handler: Handler, **limits: float) -> "tuple[HttpServer, Callable[[], Any]]":
    """A server that is not started yet, and how to start it."""
    server = HttpServer(handler, Limits(**limits))  # type: ignore[arg-type]
    context = load(write(folder, issue())).context
    return server, lambda: server.start("127.0.0.1", 0, tls=context)


# --- pairs


@settings(max_examples=40, deadline=None)
@given(st.datetimes(datetime(1951, 1, 1), datetime(9999, 12, 31)).map(lambda at: at.replace(microsecond=0)))
def test_certificate_expiry_is_read_from_the_file(tmp_path_factory: pytest.TempPathFactory, until_: datetime) -> None:
    leaf = CA.issue_cert("a", not_before=datetime(1950, 1, 1), not_after=until_)
    spec = write(tmp_path_factory.mktemp("pair"), leaf)

    assert load(spec).expires_s == until_.replace(tzinfo=UTC).timestamp()


def test_old_tls_versions_are_rejected(tmp_path: Path) -> None:
    context = load(write(tmp_path, issue())).context

    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.verify_mode == ssl.CERT_NONE
    assert not any(word in cipher["name"] for cipher in context.get_ciphers() for word in ("RC4", "3DES", "NULL"))


GARBAGE = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize(
    ("certificate", "key", "wrong"),
    [
        (None, b"", {"certificate": "No such file"}),
        (None, None, {"certificate": "No such file", "key": "No such file"}),
        (b"", b"", {"certificate": "no PEM certificate"}),
        (GARBAGE, b"", {"certificate": "no PEM certificate"}),
        (GARBAGE[:40] + b"*" + GARBAGE[41:], b"", {"certificate": "no PEM certificate"}),
        ("half", "own", {"certificate": "no PEM certificate"}),
        ("own", b"", {"key": "no PEM private key"}),
        ("own", "half", {"key": "no PEM private key"}),
        ("own", "other", {"key": "the key of another certificate"}),
        ("own", "other kind", {"key": "the key of another certificate"}),
        ("own", "locked", {"key": "a key with a password"}),
        ("weak", "weak", {"certificate": "EE_KEY_TOO_SMALL"}),
    ],
)
def test_invalid_certificate_files_have_a_reason(
    tmp_path: Path, certificate: bytes | str | None, key: bytes | str | None, wrong: dict[str, str]
) -> None:
    texts = pems(tmp_path)
    spec = TlsSpec(str(tmp_path / "a.pem"), str(tmp_path / "a.key"))
    for path, kind, content in ((spec.certificate, "certificate", certificate), (spec.key, "key", key)):
        text = texts[kind, content] if isinstance(content, str) else content
        if text is not None:
            Path(path).write_bytes(text)

    with pytest.raises(BadPair) as caught:
        load(spec)

    found = {problem.path: problem.found for problem in caught.value.problems}
    assert {path: found[path] for path in found if wrong.get(path, "?") in found[path]} == found
    assert set(found) == set(wrong)


def pems(folder: Path) -> dict[tuple[str, str], bytes]:
    """Contents of files by kind and name."""
    leaf, rsa = issue(), CA.issue_cert("localhost", key_type=trustme.KeyType.RSA)
    own = leaf.private_key_pem.bytes()
    (folder / "own").write_bytes(own)
    openssl = ["openssl", "req", "-x509", "-newkey", "rsa:1024", "-nodes", "-subj", "/CN=a"]
    subprocess.run([*openssl, "-keyout", folder / "weak.key", "-out", folder / "weak.pem"], check=True)
    locked = subprocess.run(
        ["openssl", "pkcs8", "-topk8", "-in", folder / "own", "-passout", "pass:x"], check=True, capture_output=True
    )
    return {
        ("certificate", "own"): chain(leaf),
        ("certificate", "half"): chain(leaf)[:300],
        ("certificate", "weak"): (folder / "weak.pem").read_bytes(),
        ("key", "own"): own,
        ("key", "half"): own[:100],
        ("key", "other"): issue().private_key_pem.bytes(),
        ("key", "other kind"): rsa.private_key_pem.bytes(),
        ("key", "locked"): locked.stdout,
        ("key", "weak"): (folder / "weak.key").read_bytes(),
    }


# --- renewal


def test_renewed_certificate_serves_new_connections_and_open_ones_continue(tmp_path: Path) -> None:
    async def main() -> None:
        old, new = issue(), issue()
        watched = Watched(write(tmp_path, old))
        streams: list[Exchange] = []
        server = HttpServer(streams.append, Limits())
        await server.start("127.0.0.1", 0, tls=watched.context)
        async with tls_peer(server.port) as before:
            before.send(get())
            await until(lambda: bool(streams))
            streams[0].start(200, [])
            streams[0].write(b"old ")
            write(tmp_path, new)
            watched.look()
            assert watched.reloads("taken") == 0  # it might still be written to
            watched.look()
            for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
                context = trusting()
                context.minimum_version = context.maximum_version = version
                async with tls_peer(server.port, context) as after:
                    assert seen(after) == der(new)
            streams[0].write(b"stream")
            streams[0].end()
            assert (await before.answer()).body == b"old stream"
            assert seen(before) == der(old)
        server.close()
        assert watched.reloads("taken") == 1
        assert watched.said() == []

    run(main())


def test_certificate_folder_swapped_by_a_symlink_is_noticed(tmp_path: Path) -> None:
    new = issue(NOW_S + 3 * EXPIRY_WARNING_S)
    for name, leaf in (("one", issue()), ("two", new)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, leaf)
    link = tmp_path / "current"
    link.symlink_to("one")
    watched = Watched(TlsSpec(str(link / "tls.pem"), str(link / "tls.key")))

    draft = tmp_path / "draft"
    draft.symlink_to("two")
    draft.replace(link)
    watched.look(2)

    assert watched.reloads("taken") == 1
    assert watched.metrics.gauge("tls_certificate_expiry_seconds").value == NOW_S + 3 * EXPIRY_WARNING_S


@pytest.mark.parametrize("damage", ["half", "stranger", "gone", "expired", "early"])
def test_invalid_renewal_keeps_the_old_certificate_and_warns_once(tmp_path: Path, damage: str) -> None:
    old, new = issue(), issue(NOW_S + 3 * EXPIRY_WARNING_S)
    spec = write(tmp_path, old)
    watched = Watched(spec)
    before = watched.metrics.gauge("tls_certificate_expiry_seconds").value
    if damage == "half":
        Path(spec.certificate).write_bytes(chain(new)[:200])
    elif damage == "stranger":
        Path(spec.certificate).write_bytes(chain(new))
    elif damage == "expired":
        write(tmp_path, issue(NOW_S - 1))
    elif damage == "early":
        write(tmp_path, issue(begins_s=NOW_S + 1))
    else:
        Path(spec.key).unlink()

    watched.look(4)

    assert watched.reloads("broken") == 3
    assert [line["event"] for line in watched.said()] == ["new certificate invalid, the old one stays in use"]
    assert watched.metrics.gauge("tls_certificate_expiry_seconds").value == before
    write(tmp_path, new)
    watched.look(3)
    assert watched.reloads("taken") == 1
    assert watched.metrics.gauge("tls_certificate_expiry_seconds").value == NOW_S + 3 * EXPIRY_WARNING_S


def test_listener_does_not_start_with_an_invalid_certificate(tmp_path: Path) -> None:
    with pytest.raises(BadPair, match=r"certificate: found .*No such file.*; key: found"):
        Watched(TlsSpec(str(tmp_path / "a.pem"), str(tmp_path / "a.key")))


def test_expiring_certificate_is_warned_of_once(tmp_path: Path) -> None:
    watched = Watched(write(tmp_path, issue(NOW_S + EXPIRY_WARNING_S - 1)))
    watched.look(3)
    write(tmp_path, issue(NOW_S + 1))
    watched.look(5)
    write(tmp_path, issue(NOW_S + EXPIRY_WARNING_S))
    watched.look(5)

    assert [(line["event"], line["on"]) for line in watched.said()] == [
        ("certificate expires soon", "2026-11-14"),
        ("certificate expires soon", "2026-11-01"),
    ]


def test_certificate_of_the_future_is_taken_once_it_is_valid(tmp_path: Path) -> None:
    watched = Watched(write(tmp_path, issue()))
    write(tmp_path, issue(NOW_S + 3 * EXPIRY_WARNING_S, begins_s=NOW_S + 60))
    watched.look(3)
    assert watched.reloads("taken") == 0
    watched.now = NOW_S + 60
    watched.look()

    assert watched.reloads("taken") == 1
    assert [line["event"] for line in watched.said()] == ["new certificate invalid, the old one stays in use"]


def test_expired_certificate_is_replaced_even_by_another_expired_one(tmp_path: Path) -> None:
    watched = Watched(write(tmp_path, issue(NOW_S - 2)))
    write(tmp_path, issue(NOW_S - 1))
    watched.look(3)

    assert watched.reloads("taken") == 1
    assert watched.renewal.expires_s == NOW_S - 1


# --- clients


def test_requests_are_served_and_rejected_as_without_tls(tmp_path: Path) -> None:
    async def main() -> None:
        server, start = https(tmp_path, echo, header_bytes_max=4096)
        await start()
        async with tls_peer(server.port) as client:
            client.send(post(b"one") + post(b"two"))
            assert (await client.answer()).body.endswith(b"one")
            assert (await client.answer()).body.endswith(b"two")
        for refused, status in ((b"NONSENSE\r\n\r\n", 400), (get(b"/" + b"a" * 9999), 431)):
            async with tls_peer(server.port) as client:
                client.send(refused)
                assert (await client.answer()).status == status
                assert await client.rest() == b""
        server.close()

    run(main())


@pytest.mark.parametrize("target", [b"/v1/chat/completions", b"/v1/messages"])
def test_plaintext_request_on_a_tls_port_gets_an_explanatory_error(tmp_path: Path, target: bytes) -> None:
    served: list[Exchange] = []

    async def main() -> None:
        server, start = https(tmp_path, served.append)
        refused: list[Code] = []
        server.refused = refused.append
        await start()
        for request in (get(target), post(bytes(100_000), target=target), get(target)[:2]):
            async with peer(server.port) as client:
                client.send(request)
                answer = await client.answer()
                assert (answer.status, answer.headers[b"connection"]) == (400, b"close")
                assert b"https://" in answer.body
                anthropic = target == b"/v1/messages" and len(request) > 2
                assert answer.body.startswith(b'{"type":"error"') is anthropic
                assert await client.rest() == b""
        assert refused == [Code.BAD_HTTP] * 3
        assert served == []
        await until(lambda: server.connections == 0)
        server.close()

    run(main())


@pytest.mark.parametrize("sent", [b"", b"\x80\x00", b"\x16\x03\x01\x02\x00\x01"])
def test_unfinished_handshake_times_out(tmp_path: Path, sent: bytes) -> None:
    async def main() -> None:
        server, start = https(tmp_path, echo, head_timeout_s=0.2)
        await start()
        async with peer(server.port) as client:
            client.send(sent)
            assert not (await client.rest()).startswith(b"HTTP")
        async with tls_peer(server.port) as client:
            client.send(get())
            assert (await client.answer()).status == 200
        server.close()

    run(main())


def test_client_without_close_notify_does_not_delay_the_drain(tmp_path: Path) -> None:
    async def main() -> None:
        server, start = https(tmp_path, echo, idle_timeout_s=60.0, write_timeout_s=60.0)
        await start()
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            wrapped = await asyncio.to_thread(trusting().wrap_socket, sock, server_hostname="localhost")
            with wrapped:
                await until(lambda: server.connections == 1)
                async with asyncio.timeout(PATIENCE_S):
                    assert await server.drain(60)
        server.close()

    run(main())


def answering(folder: Path, size: int) -> "tuple[HttpServer, Callable[[], Any]]":
    """A server of long answers that gives clients half a minute, and looks at them all the time."""
    whole = bytes(size)
    return https(
        folder, lambda exchange: exchange.respond(200, [], whole), idle_timeout_s=SWEEPING, write_timeout_s=30.0
    )


def hold_little(client: Peer) -> None:
    """Let its kernel take little that it has not read: uvloop drops what is not read when the connection ends."""
    client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)


@pytest.mark.interpreted
def test_slow_client_gets_its_whole_response_before_the_connection_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.4)
    size = 16 * 1024 * 1024

    async def main() -> None:
        server, start = answering(tmp_path, size)
        await start()
        async with tls_peer(server.port) as client:
            hold_little(client)
            client.send(get(b"/", b"connection: close"))
            head = await client.reader.readuntil(b"\r\n\r\n")
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            swept_s = server.common.now
            await until(lambda: server.common.now > swept_s + 0.9)
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert head.startswith(b"HTTP/1.1 200")
            got = len(await client.rest())
            assert got == size
        server.close()

    run(main())


@pytest.mark.interpreted
def test_delayed_server_does_not_mistake_a_pause_in_transmission_for_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, seen = 16 * 1024 * 1024, [1, 0]

    def in_flight(transport: asyncio.BaseTransport) -> int:
        if not seen:
            return tls.in_flight_bytes(transport)
        if found := seen.pop(0):
            threading.Event().wait(0.6)  # longer than it lingers: it is time itself that is tested
        return found

    monkeypatch.setattr(connection, "LINGER_S", 0.4)
    monkeypatch.setattr(connection, "in_flight_bytes", in_flight)

    async def main() -> None:
        server, start = answering(tmp_path, size)
        await start()
        async with tls_peer(server.port) as client:
            client.send(get(b"/", b"connection: close"))
            await client.reader.readuntil(b"\r\n\r\n")
            [served] = server._connections
            got = 0
            while served.transport.get_write_buffer_size():  # then it does not tell what it has still to send
                got += len(await client.reader.read(4096))
            await until(lambda: not seen)
            monkeypatch.setattr(connection, "LINGER_S", PATIENCE_S)  # the rest takes as long as it takes
            assert got + len(await client.rest()) == size
        server.close()

    run(main())


def test_client_that_reads_nothing_is_disconnected(tmp_path: Path) -> None:
    async def main() -> None:
        server, start = https(
            tmp_path, lambda exchange: exchange.respond(200, [], bytes(32 * 1024 * 1024)), write_timeout_s=0.2
        )
        await start()
        async with tls_peer(server.port) as client:
            client.send(get(b"/", b"connection: close"))
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await until(lambda: server.connections == 1)
            await until(lambda: server.connections == 0)
        server.close()

    run(main())


def test_stream_writer_is_paused_when_its_client_is_slow(tmp_path: Path) -> None:
    async def main() -> None:
        streams: list[Exchange] = []
        server, start = https(tmp_path, streams.append)
        await start()
        async with tls_peer(server.port) as client:
            client.send(get())
            await until(lambda: bool(streams))
            stream = streams[0]
            told: list[str] = []
            stream.source = Told(told)
            stream.start(200, [])
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            sent = 0
            async with asyncio.timeout(PATIENCE_S):
                while not stream.paused:
                    stream.write(bytes(32_768))
                    sent += 32_768
                    await asyncio.sleep(0)
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            async with asyncio.TaskGroup() as group:
                answer = group.create_task(client.answer())
                await until(lambda: not stream.paused)
                stream.end()
            got = len(answer.result().body)
            assert got == sent
            assert told[:2] == ["pause", "resume"]
        server.close()

    run(main())


def test_pool_connects_only_to_trusted_servers(tmp_path: Path) -> None:
    async def main() -> None:
        server, start = https(tmp_path, echo)
        await start()
        async with pooling(server.port, tls=trusting()) as pool:
            for _ in range(2):
                answer = Log()
                pool.call(get(), answer)
                await until(lambda: answer.done)  # noqa: B023
                assert answer.status == 200
            assert pool.connections == 1
        async with pooling(server.port, tls=ssl.create_default_context()) as pool:
            answer = Log()
            pool.call(get(), answer)
            await until(lambda: answer.done)
            assert answer.error is not None
            assert answer.error.kind == "connect"
            assert "CERTIFICATE_VERIFY_FAILED" in answer.error.text
        server.close()

    run(main())


def test_server_without_tls_still_half_closes() -> None:
    async def main() -> None:
        async with serving(echo) as server, peer(server.port) as client:
            client.send(b"NONSENSE\r\n\r\n")
            assert (await client.answer()).status == 400
            assert await client.rest() == b""

    run(main())
