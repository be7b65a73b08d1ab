"""The HTTP server: a request body that the handler rejects is not awaited or kept, and body memory is bounded."""

import gc
from typing import Any, cast

import pytest
from tests.net.memory import FakeOwner, Wire
from tests.net.rig import echo, get, peer, post, run, serving, until

from forebay.core.errors import Code
from forebay.core.model import Limits
from forebay.net.connection import LINGER_S, Connection
from forebay.net.reading.refusing import SMALL_BODY_BYTES
from forebay.net.server import Exchange
from forebay.wire.errors import error_code

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
def test_request_with_a_rejected_body_is_answered_without_it(start: bytes) -> None:
    async def main() -> None:
        async with serving(echo, wants_body=wanted) as server, peer(server.port) as client:
            client.send(start)
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, b"POST /no 0 ")
            assert answer.headers[b"connection"] == b"close"
            assert await client.rest() == b""

    run(main())


def test_body_that_arrives_with_its_head_is_accepted_without_asking() -> None:
    async def main() -> None:
        async with serving(echo, wants_body=wanted) as server, peer(server.port) as client:
            for _ in range(2):
                client.send(post(b"short", target=b"/no"))
                assert (await client.answer()).body == b"POST /no 5 short"

    run(main())


def test_wants_body_is_called_once_per_request() -> None:
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


def test_rejected_body_waits_for_the_response_of_an_earlier_request() -> None:
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
def test_client_sending_after_a_rejection_is_drained_for_a_limited_time() -> None:
    desk, wire = FakeOwner(), Wire()
    connection = Connection(desk)
    connection.connection_made(cast(Any, wire))
    connection.data_received(HEAD.replace(b"/no", b"/unwanted").replace(b"5000000", b"5000") % b"")
    connection.data_received(b"x" * 10_000)
    assert wire.eof
    assert connection._body is None
    assert connection._held is None
    while not wire.closing:
        desk.common.now += 0.9 * LINGER_S
        connection.data_received(b"x" * 10_000)
        connection.sweep(desk.common.now)
    assert desk.common.now == pytest.approx(Limits().body_timeout_s + LINGER_S, abs=2 * LINGER_S)


def test_partial_body_is_freed_when_the_client_disconnects() -> None:
    gc.collect()
    gc.disable()  # which would find it some day: with bodies of many megabytes too late
    try:
        connection, wire = Connection(FakeOwner()), Wire()
        connection.connection_made(cast(Any, wire))
        connection.data_received(b"POST /left HTTP/1.1\r\nhost: a\r\ncontent-length: 4000\r\n\r\n" + b"x" * 3000)
        connection.connection_lost(None)
        del connection
        left = [one for one in gc.get_objects() if type(one) is Exchange and one.target == b"/left"]
    finally:
        gc.enable()

    assert not left


LARGE = 100_000
ROOM = Limits(body_bytes_max=2 * LARGE, bodies_bytes_max=3 * LARGE)
CHUNKED = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


def length(size: int) -> bytes:
    """A head that says how long its body is."""
    return b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size


@pytest.mark.parametrize(
    ("bodies", "taken"),
    [
        ([], 0),
        ([(length(2 * LARGE), b"x")], 2 * LARGE),
        ([(length(LARGE), b"")] * 3, 3 * LARGE),
        ([(length(SMALL_BODY_BYTES), b"x" * 60_000)] * 9, 0),
        ([(CHUNKED, b"f000\r\n" + b"x" * 0xF000)] * 9, 0),
        ([(CHUNKED, b"%x\r\n" % LARGE + b"x" * LARGE)], 2 * LARGE),
    ],
)
def test_large_body_reserves_its_declared_size(bodies: list[tuple[bytes, bytes]], taken: int) -> None:
    desk = FakeOwner()
    desk.common.limits = ROOM
    for head, part in bodies:
        connection, wire = Connection(desk), Wire()
        connection.connection_made(cast(Any, wire))
        connection.data_received(head)
        connection.data_received(part)
        assert not wire.sent

    assert desk.common.bodies_bytes == taken


def body_of(size: int) -> bytes:
    return b"y" * size


@pytest.mark.parametrize(
    "start", [length(LARGE), CHUNKED + b"%x\r\n" % LARGE + body_of(LARGE)], ids=["length", "chunked"]
)
def test_body_over_the_memory_limit_is_rejected_and_others_continue(start: bytes) -> None:
    async def main() -> None:
        async with (
            serving(echo, ROOM) as server,
            peer(server.port) as first,
            peer(server.port) as second,
            peer(server.port) as small,
            peer(server.port) as last,
        ):
            first.send(length(2 * LARGE) + b"x")
            second.send(length(LARGE) + b"x")
            await until(lambda: server.common.bodies_bytes == 3 * LARGE)
            last.send(start)
            answer = await last.answer()
            assert (answer.status, answer.headers[b"retry-after"]) == (503, b"1")
            assert (answer.headers[b"connection"], answer.headers[b"x-forebay-retryable"]) == (b"close", b"1")
            assert error_code(answer.body) == Code.BODIES_LIMIT
            small.send(post(body_of(1000)))
            assert (await small.answer()).status == 200
            for client, rest in ((first, 2 * LARGE - 1), (second, LARGE - 1)):
                client.send(body_of(rest))
                assert (await client.answer()).status == 200
            assert server.common.bodies_bytes == 0
            first.send(post(body_of(LARGE)))
            assert (await first.answer()).status == 200

    run(main())


def test_body_larger_than_the_shared_limit_is_read_when_it_is_alone() -> None:
    async def main() -> None:
        limits = Limits(body_bytes_max=3 * LARGE, bodies_bytes_max=LARGE)
        async with serving(echo, limits) as server, peer(server.port) as client:
            client.send(post(body_of(2 * LARGE)))
            assert (await client.answer()).status == 200

    run(main())


@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], id="leaves"),
        pytest.param([b"x" * LARGE], id="complete"),
        pytest.param([b"x" * 70_000, b"x" * (LARGE - 70_000) + b"no request"], id="bad request after it"),
    ],
)
@pytest.mark.parametrize(
    "head",
    [
        pytest.param(length(LARGE), id="length"),
        pytest.param(length(LARGE).replace(b" / ", b" /unwanted "), id="unwanted"),
        pytest.param(
            length(LARGE).replace(b"host", b"connection: upgrade\r\nupgrade: h2c\r\nhost"), id="another protocol"
        ),
        pytest.param(CHUNKED + b"%x\r\n" % LARGE, id="chunked"),
        pytest.param(CHUNKED + b"11170\r\n" + b"x" * 70_000 + b"\r\nnonsense", id="bad chunk"),
    ],
)
def test_body_memory_is_released_however_a_request_ends(head: bytes, more: list[bytes]) -> None:
    desk, wire = FakeOwner(), Wire()
    desk.common.limits = ROOM
    connection = Connection(desk)
    connection.connection_made(cast(Any, wire))
    for part in (head, *more):
        if not wire.closing:
            connection.data_received(part)
    connection.connection_lost(None)

    assert desk.common.bodies_bytes == 0


def test_body_memory_is_released_when_a_body_times_out() -> None:
    desk, wire = FakeOwner(), Wire()
    desk.common.limits = ROOM
    connection = Connection(desk)
    connection.connection_made(cast(Any, wire))
    connection.data_received(length(LARGE))
    assert desk.common.bodies_bytes == LARGE
    connection.sweep(ROOM.body_timeout_s + 1)

    assert b"408" in wire.sent
    assert desk.common.bodies_bytes == 0
