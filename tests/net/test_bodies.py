"""The HTTP server: a body that nobody wants is not waited for, and never held."""

import gc
from typing import Any, cast

import pytest
from tests.net.memory import Desk, Wire
from tests.net.rig import echo, get, peer, post, run, serving, until

from forebay.core.model import Limits
from forebay.net.connection import LINGER_S, Connection
from forebay.net.server import Exchange

HEAD = b"POST /no HTTP/1.1\r\nhost: a\r\n%bcontent-length: 5000000\r\n\r\n"


def wanted(exchange: Exchange) -> bool:
    return exchange.target != b"/no"


@pytest.mark.parametrize(
    "start",
    [
        HEAD % b"",
        HEAD % b"" + b"half a body",
        HEAD % b"expect: 100-continue\r\n",
        HEAD % b"connection: upgrade\r\nupgrade: h2c\r\n" + b"half a body",
        b"POST /no HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /no HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhalf ",
        b"POST /no HTTP/1.0\r\ncontent-length: 9\r\n\r\nhalf",
    ],
)
def test_a_request_whose_body_is_not_wanted_is_answered_without_it(start: bytes) -> None:
    async def main() -> None:
        async with serving(echo, wants_body=wanted) as server, peer(server.port) as client:
            client.send(start)
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, b"POST /no 0 ")
            assert answer.headers[b"connection"] == b"close"
            assert await client.rest() == b""

    run(main())


def test_a_body_that_comes_with_its_head_is_not_asked_about() -> None:
    async def main() -> None:
        async with serving(echo, wants_body=wanted) as server, peer(server.port) as client:
            for _ in range(2):
                client.send(post(b"short", target=b"/no"))
                assert (await client.answer()).body == b"POST /no 5 short"

    run(main())


def test_a_body_is_asked_about_once_in_however_many_parts_it_comes() -> None:
    asked: list[bytes] = []

    def wants(exchange: Exchange) -> bool:
        asked.append(exchange.target)
        return True

    async def main() -> None:
        async with serving(echo, wants_body=wants) as server, peer(server.port) as client:
            for n in (1, 2):
                client.send(post(b"long", b"expect: 100-continue")[:-4])
                assert (await client.answer()).status == 100
                client.send(b"lo")
                client.send(b"ng")
                assert (await client.answer()).body == b"POST / 4 long"
                assert asked == [b"/"] * n

    run(main())


def test_what_was_asked_before_is_answered_before() -> None:
    waiting: list[Exchange] = []

    async def main() -> None:
        async with serving(waiting.append, wants_body=wanted) as server, peer(server.port) as client:
            client.send(get(b"/first") + HEAD % b"")
            await until(lambda: bool(waiting))
            assert [exchange.target for exchange in waiting] == [b"/first"]
            waiting.pop().respond(200, [], b"first")
            assert (await client.answer()).body == b"first"
            await until(lambda: bool(waiting))
            client.send(b"x" * 100_000)
            waiting.pop().respond(401, [], b"second")
            assert (await client.answer()).status == 401
            assert await client.rest() == b""

    run(main())


@pytest.mark.interpreted
def test_who_goes_on_sending_is_listened_to_but_not_for_ever() -> None:
    desk, wire = Desk(), Wire()
    connection = Connection(desk)
    connection.connection_made(cast(Any, wire))
    connection.data_received(HEAD.replace(b"/no", b"/unwanted").replace(b"5000000", b"5000") % b"")
    connection.data_received(b"x" * 10_000)
    assert wire.eof
    assert connection._body == connection._held == []
    while not wire.closing:
        desk.now += 0.9 * LINGER_S
        connection.data_received(b"x" * 10_000)
        connection.sweep(desk.now)
    assert desk.now == pytest.approx(Limits().body_timeout_s + LINGER_S, abs=2 * LINGER_S)


def test_what_a_client_has_sent_is_let_go_of_when_it_leaves_in_the_middle() -> None:
    gc.collect()
    gc.disable()  # which would find it some day: with bodies of many megabytes too late
    try:
        connection, wire = Connection(Desk()), Wire()
        connection.connection_made(cast(Any, wire))
        connection.data_received(b"POST /left HTTP/1.1\r\nhost: a\r\ncontent-length: 4000\r\n\r\n" + b"x" * 3000)
        connection.connection_lost(None)
        del connection
        left = [one for one in gc.get_objects() if type(one) is Exchange and one.target == b"/left"]
    finally:
        gc.enable()

    assert not left
