"""The HTTP server's limits: excess is rejected or disconnected, and the client gets the reason."""

import asyncio
import contextlib
from dataclasses import replace

import msgspec
import pytest
from tests.net.rig import echo, get, peer, post, run, serving, until

from forebay.core.errors import Code
from forebay.core.model import Limits
from forebay.net.server import Exchange


def code_of(body: bytes) -> str:
    return str(msgspec.json.decode(body)["error"]["code"])


CHUNKED = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"

BAD = [
    (b"nonsense\r\n\r\n", 400, Code.BAD_HTTP),
    (b"GET / HTTP/1.1\r\n\r\n", 400, Code.BAD_HTTP),
    (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400, Code.BAD_HTTP),
    (b"GET / HTTP/1.1\r\nhost : a\r\n\r\n", 400, Code.BAD_HTTP),
    (b"GET / HTTP/1.1\r\nhost: a\r\nx: \x00\r\n\r\n", 400, Code.BAD_HTTP),
    (b"GET / HTTP/1.1\nhost: a\n\n", 400, Code.BAD_HTTP),
    (CHUNKED[:-2] + b"content-length: 3\r\n\r\n0\r\n\r\n", 400, Code.BAD_HTTP),
    (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\nabc", 400, Code.BAD_HTTP),
    (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc", 400, Code.BAD_HTTP),
    (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -3\r\n\r\nabc", 400, Code.BAD_HTTP),
    (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: +3\r\n\r\nabc", 400, Code.BAD_HTTP),
    (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400, Code.BAD_HTTP),
    (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400, Code.BAD_HTTP),
    (CHUNKED + b"zz\r\n", 400, Code.BAD_HTTP),
    (CHUNKED + b"3\r\nabcd\r\n", 400, Code.BAD_HTTP),
    (b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n", 405, Code.METHOD_NOT_ALLOWED),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, Code.BAD_HTTP),
    (b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 20 + b"\r\n", 431, Code.HEADERS_TOO_LARGE),
    (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 3000 + b"\r\n\r\n", 431, Code.HEADERS_TOO_LARGE),
    (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 3000, 431, Code.HEADERS_TOO_LARGE),
    (b"GET /" + b"y" * 3000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", 431, Code.HEADERS_TOO_LARGE),
    (post(b"x" * 5001), 413, Code.BODY_TOO_LARGE),
    (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5001\r\n\r\n", 413, Code.BODY_TOO_LARGE),
    (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999999\r\n\r\n", 413, Code.BODY_TOO_LARGE),
    (CHUNKED + (b"1000\r\n" + b"x" * 4096 + b"\r\n") * 2, 413, Code.BODY_TOO_LARGE),
    (CHUNKED + b"0\r\nx: " + b"y" * 6000 + b"\r\n\r\n", 413, Code.BODY_TOO_LARGE),
]
SMALL = Limits(header_bytes_max=2048, headers_max=16, body_bytes_max=5000)


@pytest.mark.parametrize(("data", "status", "code"), BAD)
def test_invalid_request_gets_an_error_object_and_closes_the_connection(data: bytes, status: int, code: Code) -> None:
    refused: list[Code] = []

    async def main() -> None:
        async with serving(echo, SMALL, refused=refused.append) as server, peer(server.port) as client:
            client.send(get(b"/good"))
            assert (await client.answer()).body == b"GET /good 0 "
            client.send(data)
            answer = await client.answer()
            assert (answer.status, code_of(answer.body)) == (status, code)
            assert answer.headers[b"connection"] == b"close"
            assert await client.rest() == b""
            assert refused == [code]

    run(main())


@pytest.mark.parametrize("space", [b" ", b"\t", b" \t "])
def test_space_behind_a_header_value_is_no_part_of_it(space: bytes) -> None:
    values: list[bytes | None] = []

    def note(exchange: Exchange) -> None:
        values.append(exchange.header(b"x-one"))
        echo(exchange)

    async def main() -> None:
        async with serving(note, SMALL) as server, peer(server.port) as client:
            client.send(get(b"/", b"x-one: a b" + space, b"x-two:" + space))
            assert (await client.answer()).status == 200
            client.send(CHUNKED.replace(b"chunked", b"chunked ") + b"5\r\nhello\r\n0\r\n\r\n")
            assert (await client.answer()).body == b"POST / 5 hello"

    run(main())
    assert values == [b"a b", None]


def test_http_2_client_gets_an_explanatory_error() -> None:
    async def main() -> None:
        async with serving(echo) as server, peer(server.port) as client:
            client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            assert b"HTTP/2 is not supported." in (await client.answer()).body

    run(main())


@pytest.mark.parametrize("target", [b"/v1/messages", b"/v1/messages/count_tokens?beta=true"])
@pytest.mark.parametrize(
    ("rest", "status", "kind", "code"),
    [
        (b"host: a\r\ncontent-length: 5001\r\n\r\n", 413, "request_too_large", "body_too_large"),
        (b"host: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400, "invalid_request_error", "bad_http"),
        (b"\r\n", 400, "invalid_request_error", "bad_http"),
        (b"host: a\r\n" + b"x: y\r\n" * 20 + b"\r\n", 431, "invalid_request_error", "headers_too_large"),
        (b"host: a\r\ncontent-length: 9\r\n\r\nslow", 408, "timeout_error", "request_timeout"),
    ],
)
def test_messages_endpoint_errors_have_the_anthropic_format(
    target: bytes, rest: bytes, status: int, kind: str, code: str
) -> None:
    async def main() -> None:
        async with serving(echo, replace(SMALL, body_timeout_s=0.05)) as server, peer(server.port) as client:
            client.send(get(b"/good"))
            assert (await client.answer()).status == 200
            client.send(b"POST %b HTTP/1.1\r\n" % target + rest)
            answer = await client.answer()
            said = msgspec.json.decode(answer.body)
            assert (answer.status, said["type"], said["error"]["type"]) == (status, "error", kind)
            assert said["error"]["details"]["error_code"] == code

    run(main())


def test_error_for_bytes_behind_a_message_has_the_default_format() -> None:
    async def main() -> None:
        async with serving(echo, SMALL) as server, peer(server.port) as client:
            client.send(b"POST /v1/messages HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nhi" + b"\x00nonsense\r\n")
            assert (await client.answer()).status == 200
            said = msgspec.json.decode((await client.answer()).body)
            assert "type" not in said
            assert said["error"]["code"] == "bad_http"

    run(main())


def test_internal_error_has_the_format_of_the_path() -> None:
    def broken(exchange: Exchange) -> None:
        raise RuntimeError("a mistake")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context["message"]))
        async with serving(broken, SMALL) as server, peer(server.port) as client:
            client.send(get(b"/v1/messages"))
            answer = await client.answer()
            assert (answer.status, msgspec.json.decode(answer.body)["error"]["type"]) == (500, "api_error")
        assert told == ["handler failed"]

    told: list[str] = []
    run(main())


def test_invalid_bytes_are_rejected_after_earlier_requests_are_answered() -> None:
    waiting: list[Exchange] = []

    async def main() -> None:
        async with serving(waiting.append) as server, peer(server.port) as client:
            client.send(get(b"/good") + b"nonsense\r\n\r\n")
            await until(lambda: bool(waiting))
            waiting[0].respond(200, [], b"good")
            assert (await client.answer()).body == b"good"
            assert (await client.answer()).status == 400
            assert await client.rest() == b""

    run(main())


def test_head_of_the_maximum_size_passes_with_a_body_in_the_same_read() -> None:
    async def main() -> None:
        async with serving(echo, SMALL) as server, peer(server.port) as client:
            client.send(post(b"b" * 4000, b"x: " + b"y" * 1900))
            assert (await client.answer()).status == 200

    run(main())


def test_client_still_sending_a_rejected_body_can_read_the_error() -> None:
    async def main() -> None:
        async with serving(echo, SMALL) as server, peer(server.port) as client:
            client.send(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3000000\r\n\r\n" + b"x" * 3_000_000)
            assert (await client.answer()).status == 413

    run(main())


@pytest.mark.parametrize(
    ("part", "limits", "answer"),
    [
        (b"", Limits(idle_timeout_s=0.1), b""),
        (b"GET / HT", Limits(head_timeout_s=0.1), b"408"),
        (post(b"xyz")[:-1], Limits(body_timeout_s=0.1), b"408"),
        (get(), Limits(idle_timeout_s=0.1), b"200"),
    ],
)
def test_silent_client_is_disconnected(part: bytes, limits: Limits, answer: bytes) -> None:
    async def main() -> None:
        async with serving(echo, limits) as server, peer(server.port) as client:
            client.send(part)
            assert (await client.rest())[9:12] == answer
            await until(lambda: server.connections == 0)

    run(main())


def test_slowloris_client_is_disconnected() -> None:
    async def main() -> None:
        async with serving(echo, Limits(head_timeout_s=0.2)) as server, peer(server.port) as client:
            client.send(b"GET / HTTP/1.1\r\n")
            dripped = 0
            while server.connections:
                client.send(b"x: y\r\n")
                dripped += 1
                assert dripped < 2000
                await asyncio.sleep(0.005)

    run(main())


def test_connections_over_the_limit_get_503_while_all_others_are_busy() -> None:
    waiting: list[Exchange] = []

    async def main() -> None:
        async with serving(waiting.append, Limits(connections_max=2)) as server, contextlib.AsyncExitStack() as stack:
            first, second = [await stack.enter_async_context(peer(server.port)) for _ in range(2)]
            for client in (first, second):
                client.send(get())
            await until(lambda: len(waiting) == 2)
            async with peer(server.port) as third:
                answer = await third.answer()
                assert (answer.status, code_of(answer.body)) == (503, Code.CONNECTION_LIMIT)
            await until(lambda: server.connections == 2)
            for exchange in waiting:
                exchange.respond(200, [], b"")
            assert (await first.answer()).status == 200

    run(main())
