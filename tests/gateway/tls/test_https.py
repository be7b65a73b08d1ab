"""A gateway with a certificate: streams over HTTPS, and a renewal while one is open."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.gateway.rig import ROUTES, Worker, chat, events, fronting, post, routes, working
from tests.net.certificates import der, issue, seen, tls_peer, write
from tests.net.rig import peer, run, until

from forebay.core.model import Sessions, TlsSpec
from forebay.gateway.serve import NoPort
from forebay.net import tls

READY = b"GET /readyz HTTP/1.1\r\nhost: a\r\n\r\n"


async def status(port: int, request: bytes) -> int:
    """The status of one request on a connection of its own."""
    async with tls_peer(port) as client:
        client.send(request)
        return (await client.answer()).status


def test_an_open_stream_goes_on_while_new_connections_see_the_new_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "LOOK_S", 0.02)

    async def main() -> None:
        old, new = issue(), issue()
        worker = Worker(lambda _: None)
        async with working(worker), fronting(tmp_path, routes(worker), tls=write(tmp_path, old)) as front:
            async with asyncio.timeout(20):
                while await status(front.port, READY) != 200:
                    await asyncio.sleep(0.01)
            async with tls_peer(front.port) as client:
                client.send(post(chat(stream=True)))
                await until(lambda: bool(worker.requests))
                write(tmp_path, new)
                async with asyncio.timeout(20):
                    while True:
                        async with tls_peer(front.port) as other:
                            if seen(other) == der(new):
                                break
                        await asyncio.sleep(0.01)
                events(worker.requests[0])
                assert (await client.answer()).body.endswith(b"data: [DONE]\n\n")
                assert seen(client) == der(old)
                client.send(b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n")
                assert (
                    b'forebay_tls_reloads_total{gateway="gateway-0",outcome="taken"} 1.0'
                    in (await client.answer()).body
                )

    run(main())


def test_session_cookie_is_secure_only_over_https(tmp_path: Path) -> None:
    base = replace(ROUTES, sessions=Sessions.COOKIE)

    async def main() -> None:
        worker = Worker()
        async with working(worker):
            cookies = []
            for pair in (write(tmp_path, issue()), None):
                folder = tmp_path / str(len(cookies))
                folder.mkdir()
                async with (
                    fronting(folder, routes(worker, base=base), tls=pair) as front,
                    (tls_peer if pair else peer)(front.port) as client,
                ):
                    client.send(post(chat()))  # waits until the gateway has heard from the replica
                    cookies.append((await client.answer()).headers[b"set-cookie"])
            assert [cookie.endswith(b"; Secure") for cookie in cookies] == [True, False]

    run(main())


def test_gateway_exits_with_a_clear_message_without_a_valid_certificate(tmp_path: Path) -> None:
    spec = TlsSpec(str(tmp_path / "missing.pem"), str(tmp_path / "missing.key"))

    async def main() -> None:
        async with fronting(tmp_path, ROUTES, tls=spec):
            raise AssertionError("it must not start")

    with pytest.raises(BaseExceptionGroup) as caught:
        run(main())
    found = caught.value.split(NoPort)[0]
    assert found is not None
    assert "cannot serve HTTPS on 127.0.0.1:0: certificate: found" in str(found.exceptions[0])
