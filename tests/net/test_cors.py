"""CORS: which web pages may read responses."""

import pytest
from tests.net.rig import get, peer, run, serving

from forebay.net.cors import Cors, is_foreign
from forebay.net.server import Exchange

PAGE = b"origin: https://app.example"
ALLOW = b"access-control-allow-origin"
ASKING = (b"access-control-request-method: POST", b"access-control-request-headers: authorization,content-type")


@pytest.mark.parametrize(
    ("origins", "fields", "allowed", "vary"),
    [
        ((), (PAGE,), None, b"origin"),
        (("*",), (PAGE,), b"*", None),
        (("https://app.example", "http://localhost:3000"), (PAGE,), b"https://app.example", b"origin"),
        (("https://other.example",), (PAGE,), None, b"origin"),
        (("https://app.example",), (b"origin: null",), None, b"origin"),
        (("https://app.example",), (b"origin: https://app.example.evil",), None, b"origin"),
        (("*",), (), None, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_listed_origin_may_read_responses(
    origins: tuple[str, ...], fields: tuple[bytes, ...], allowed: bytes | None, vary: bytes | None, stream: bool
) -> None:
    cors = Cors(origins)

    def handle(exchange: Exchange) -> None:
        assert not cors.answers(exchange)
        if stream:
            exchange.start(200, [])
            exchange.end()
        else:
            exchange.respond(404, [], b"no")

    async def main() -> None:
        async with serving(handle) as server, peer(server.port) as client:
            client.send(get(b"/", *fields))
            answer = await client.answer()
            assert answer.headers.get(ALLOW) == allowed
            assert answer.headers.get(b"vary") == vary
            assert (b"access-control-expose-headers" in answer.headers) is (allowed is not None)

    run(main())


@pytest.mark.parametrize(("origins", "may"), [(("*",), True), (("https://app.example",), True), ((), False)])
def test_preflight_requests_are_answered(origins: tuple[str, ...], may: bool) -> None:
    cors = Cors(origins)

    def handle(exchange: Exchange) -> None:
        if not cors.answers(exchange):
            exchange.respond(405, [], b"")

    async def main() -> None:
        async with serving(handle) as server, peer(server.port) as client:
            question = get(b"/v1/models", PAGE, *ASKING).replace(b"GET", b"OPTIONS", 1)
            client.send(question)
            answer = await client.answer()
            assert answer.status == 204
            assert (answer.headers.get(ALLOW) is not None) is may
            assert (answer.headers.get(b"access-control-allow-headers") == b"authorization,content-type") is may
            assert (b"POST" in answer.headers.get(b"access-control-allow-methods", b"")) is may
            client.send(question.replace(ASKING[0] + b"\r\n", b""))
            assert (await client.answer()).status == 405

    run(main())


@pytest.mark.parametrize(
    ("origin", "foreign"),
    [
        (b"https://evil.example", True),
        (b"http://evil.example:8080", True),
        (b"http://localhost.evil.example", True),
        (b"http://127.0.0.1.evil.example", True),
        (b"https://localhost@evil.example", True),
        (b"null", True),
        (b"", True),
        (b"HTTPS://x://y", True),
        (b"http://localhost:3000", False),
        (b"http://127.0.0.1:8080", False),
        (b"https://[::1]:3000", False),
        (b"app://obsidian.md", False),
        (b"vscode-webview://1a2b", False),
        (b"file://", False),
    ],
)
def test_origins_of_other_hosts_are_foreign(origin: bytes, foreign: bool) -> None:
    assert is_foreign(origin) is foreign
