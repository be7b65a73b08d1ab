"""The HTTP server: framing, order, keep-alive, streams, limits, draining."""

import asyncio
import contextlib
import socket

import msgspec
import pytest
from tests.net.rig import Told, echo, get, peer, post, run, serving, until

from forebay.core.errors import Code
from forebay.core.model import Limits
from forebay.net.server import Exchange, HttpServer


def code_of(body: bytes) -> str:
    return str(msgspec.json.decode(body)["error"]["code"])


def test_requests_on_one_connection_are_answered_in_order() -> None:
    async def main() -> None:
        async with serving(echo) as server, peer(server.port) as client:
            for n in range(3):
                client.send(post(b"x" * n))
                answer = await client.answer()
                assert (answer.status, answer.body) == (200, b"POST / %d %b" % (n, b"x" * n))
                assert b"date" in answer.headers
            assert server.connections == 1

    run(main())


def test_pipelined_requests_are_answered_in_order_even_when_the_first_is_slow() -> None:
    waiting: list[Exchange] = []

    def handler(exchange: Exchange) -> None:
        if exchange.path == "/slow":
            waiting.append(exchange)
        else:
            echo(exchange)

    async def main() -> None:
        async with serving(handler) as server, peer(server.port) as client:
            client.send(get(b"/slow") + get(b"/b") + post(b"cc"))
            await until(lambda: bool(waiting))
            client.send(get(b"/d"))
            waiting[0].start(200, [])
            waiting[0].write(b"one")
            waiting[0].write(b"two")
            waiting[0].end([(b"x-usage", b"1,2,3")])
            first = await client.answer()
            assert (first.body, first.trailers) == (b"onetwo", {b"x-usage": b"1,2,3"})
            assert [(await client.answer()).body for _ in range(3)] == [b"GET /b 0 ", b"POST / 2 cc", b"GET /d 0 "]

    run(main())


def test_excess_pipelined_requests_close_the_connection_after_the_allowed_ones() -> None:
    async def main() -> None:
        async with serving(echo, Limits(pipelined_max=3)) as server, peer(server.port) as client:
            client.send(get() * 10)
            answers = [await client.answer() for _ in range(3)]
            assert answers[-1].headers[b"connection"] == b"close"
            assert await client.rest() == b""

    run(main())


def test_pipelined_bytes_are_read_only_up_to_a_bound() -> None:
    waiting: list[Exchange] = []

    async def main() -> None:
        async with serving(waiting.append) as server, peer(server.port) as client:
            client.send(get(b"/slow"))
            await until(lambda: bool(waiting))
            client.send(post(b"x" * 6_000_000) * 2)
            sent = client.writer.transport.get_write_buffer_size
            await until(lambda: 0 < sent() < 12_000_000)
            stuck = -1
            while stuck != sent():
                stuck = sent()
                await asyncio.sleep(0.05)
            assert stuck > 4_000_000
            for n in range(3):
                await until(lambda n=n: len(waiting) > n)  # type: ignore[misc]
                waiting[n].respond(200, [], b"")
                assert (await client.answer()).status == 200
            assert [len(e.body) for e in waiting] == [0, 6_000_000, 6_000_000]

    run(main())


@pytest.mark.parametrize(
    ("request_", "keeps"),
    [
        (get(), True),
        (get(b"/", b"connection: close"), False),
        (b"GET / HTTP/1.0\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n", True),
    ],
)
def test_connection_is_kept_alive_exactly_when_the_client_asks_for_it(request_: bytes, keeps: bool) -> None:
    async def main() -> None:
        async with serving(echo) as server, peer(server.port) as client:
            client.send(request_)
            answer = await client.answer()
            assert answer.status == 200
            if keeps:
                client.send(get())
                assert (await client.answer()).status == 200
            else:
                assert answer.headers[b"connection"] == b"close"
                assert await client.rest() == b""

    run(main())


def test_http_1_0_stream_is_unchunked_and_ends_with_the_connection() -> None:
    def handler(exchange: Exchange) -> None:
        exchange.start(200, [])
        exchange.write(b"a")
        exchange.write(b"b")
        exchange.end([(b"x", b"y")])

    async def main() -> None:
        async with serving(handler) as server, peer(server.port) as client:
            client.send(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
            answer = await client.answer()
            assert b"transfer-encoding" not in answer.headers
            assert answer.body == b"ab"

    run(main())


def test_head_gets_the_length_but_no_body() -> None:
    async def main() -> None:
        async with serving(echo) as server, peer(server.port) as client:
            client.send(b"HEAD / HTTP/1.1\r\nhost: a\r\n\r\n" + get())
            assert (await client.answer(head=True)).headers[b"content-length"] == b"9"
            assert (await client.answer()).body == b"GET / 0 "

    run(main())


def test_expect_100_continue_is_answered_before_the_body_is_sent() -> None:
    async def main() -> None:
        async with serving(echo) as server, peer(server.port) as client:
            client.send(b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-Continue\r\ncontent-length: 2\r\n\r\n")
            assert (await client.answer()).status == 100
            client.send(b"ok" + get())
            assert (await client.answer()).body == b"POST / 2 ok"
            assert (await client.answer()).body == b"GET / 0 "

    run(main())


def test_expect_100_continue_behind_another_request_waits_for_its_response() -> None:
    async def main() -> None:
        async with serving(echo) as server, peer(server.port) as client:
            client.send(get() + b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
            assert (await client.answer()).status == 200
            assert (await client.answer()).status == 100
            client.send(b"ok")
            assert (await client.answer()).body == b"POST / 2 ok"

    run(main())


def test_too_large_expected_body_is_rejected_without_100() -> None:
    async def main() -> None:
        async with serving(echo, Limits(body_bytes_max=10)) as server, peer(server.port) as client:
            client.send(b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 11\r\n\r\n")
            assert (await client.answer()).status == 413

    run(main())


def test_upgrade_offer_is_served_as_plain_http() -> None:
    async def main() -> None:
        async with serving(echo) as server, peer(server.port) as client:
            offer = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAA")
            client.send(post(b"hello", *offer) + get(b"/x", *offer))
            client.send(get(b"/y"))
            got = [(await client.answer()).body for _ in range(3)]
            assert got == [b"POST / 5 hello", b"GET /x 0 ", b"GET /y 0 "]

    run(main())


CHUNKED = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


def test_chunked_request_body_is_joined_and_its_trailers_dropped() -> None:
    async def main() -> None:
        async with serving(echo) as server, peer(server.port) as client:
            client.send(CHUNKED + b"3\r\nabc\r\n4;x=y\r\ndefg\r\n0\r\nx-t: 1\r\n\r\n" + get())
            assert (await client.answer()).body == b"POST / 7 abcdefg"
            assert (await client.answer()).body == b"GET / 0 "

    run(main())


def test_stream_client_that_reads_nothing_is_disconnected_and_the_handler_notified() -> None:
    gone: list[bool] = []
    paused: list[str] = []

    def handler(exchange: Exchange) -> None:
        exchange.on_disconnect = lambda: gone.append(True)
        exchange.source = Told(paused)
        exchange.start(200, [])
        for _ in range(80):
            exchange.write(b"x" * 100_000)

    async def main() -> None:
        limits = Limits(write_timeout_s=0.2, stream_buffer_bytes_max=100_000_000)
        async with serving(handler, limits) as server, peer(server.port, receive_bytes=4096) as client:
            client.send(get())
            await until(lambda: gone == [True])
            assert paused
            await until(lambda: server.connections == 0)

    run(main())


def test_handler_that_ignores_pause_is_disconnected_at_the_buffer_limit() -> None:
    exchanges: list[Exchange] = []

    async def main() -> None:
        async with serving(exchanges.append) as server, peer(server.port, receive_bytes=4096) as client:
            client.send(get())
            await until(lambda: bool(exchanges))
            exchanges[0].start(200, [])
            for _ in range(10_000):
                exchanges[0].write(b"x" * 10_000)
                if exchanges[0].finished:
                    break
                await asyncio.sleep(0)
            assert exchanges[0].finished

    run(main())


def test_slow_reader_pauses_and_resumes_the_handler() -> None:
    told: list[str] = []
    exchanges: list[Exchange] = []

    async def main() -> None:
        async with serving(exchanges.append) as server, peer(server.port, receive_bytes=4096) as client:
            client.send(get())
            await until(lambda: bool(exchanges))
            exchange = exchanges[0]
            exchange.source = Told(told)
            exchange.start(200, [])
            written = 0
            while not told:
                exchange.write(b"x" * 50_000)
                written += 50_000
                await asyncio.sleep(0)
            reading = asyncio.gather(client.answer())
            await until(lambda: told == ["pause", "resume"])
            exchange.end()
            assert len((await reading)[0].body) == written

    run(main())


def test_disconnect_is_noticed_at_once_and_late_writes_are_harmless() -> None:
    exchanges: list[Exchange] = []
    gone: list[int] = []

    async def main() -> None:
        async with serving(exchanges.append) as server:
            for n, begin in enumerate((False, True)):
                async with peer(server.port) as client:
                    client.send(get())
                    await until(lambda n=n: len(exchanges) > n)  # type: ignore[misc]
                    exchanges[n].on_disconnect = lambda n=n: gone.append(n)
                    if begin:
                        exchanges[n].start(200, [])
                await until(lambda n=n: len(gone) > n)  # type: ignore[misc]
                exchanges[n].write(b"late")
                exchanges[n].end()
                exchanges[n].respond(200, [], b"late")
                assert exchanges[n].finished
            assert gone == [0, 1]

    run(main())


def test_half_closed_client_counts_as_gone_but_gets_ready_responses() -> None:
    async def main() -> None:
        async with serving(echo) as server, peer(server.port) as client:
            client.send(get())
            client.writer.write_eof()
            assert (await client.answer()).status == 200
            assert await client.rest() == b""

    run(main())


def test_aborted_stream_has_no_clean_end() -> None:
    def handler(exchange: Exchange) -> None:
        exchange.start(200, [])
        exchange.write(b"data")
        exchange.abort()

    async def main() -> None:
        async with serving(handler) as server, peer(server.port) as client:
            client.send(get())
            data = await client.rest()
            assert data.endswith(b"4\r\ndata\r\n")

    run(main())


@pytest.mark.parametrize("started", [False, True])
def test_exception_in_a_handler_fails_one_request_and_is_reported(started: bool) -> None:
    reports: list[str] = []

    def handler(exchange: Exchange) -> None:
        if started:
            exchange.start(200, [])
        raise ZeroDivisionError

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context["message"]))
        async with serving(handler) as server, peer(server.port) as client:
            client.send(get())
            if started:
                with pytest.raises(asyncio.IncompleteReadError):
                    await client.answer()
            else:
                answer = await client.answer()
                assert (answer.status, code_of(answer.body)) == (500, Code.INTERNAL)
            assert reports == ["handler failed"]

    run(main())


def test_bytes_behind_the_last_request_are_dropped_without_affecting_its_response() -> None:
    waiting: list[Exchange] = []

    async def main() -> None:
        async with serving(waiting.append, Limits(idle_timeout_s=0.1)) as server, peer(server.port) as client:
            client.send(get(b"/", b"connection: close") + b"more" * 100)
            await until(lambda: bool(waiting))
            start = server.common.now
            await until(lambda: server.common.now > start + 1.5)
            assert not waiting[0].finished
            waiting[0].respond(200, [], b"late")
            assert (await client.answer()).body == b"late"
            assert await client.rest() == b""

    run(main())


def test_draining_connection_drops_pipelined_requests() -> None:
    waiting: list[Exchange] = []

    async def main() -> None:
        async with serving(waiting.append) as server, peer(server.port) as client:
            client.send(get(b"/a") + get(b"/b"))
            await until(lambda: bool(waiting))
            client.send(get(b"/c"))
            server.common.draining = True
            await until(lambda: bool(next(iter(server._connections))._held))
            waiting[0].respond(200, [], b"a")
            assert (await client.answer()).headers[b"connection"] == b"close"
            assert await client.rest() == b""
            assert len(waiting) == 1

    run(main())


@pytest.mark.parametrize("clients", [1, 2])
def test_accepted_sockets_do_not_delay_small_writes(clients: int) -> None:
    async def main() -> None:
        async with serving(echo) as server, contextlib.AsyncExitStack() as stack:
            for _ in range(clients):  # the loop has no turn here
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            await until(lambda: len(server._connections) == clients and not server._arriving)
            for connection in server._connections:
                sock = connection.transport.get_extra_info("socket")
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run(main())


def test_drain_finishes_active_requests_closes_idle_connections_and_stops_accepting() -> None:
    exchanges: list[Exchange] = []

    async def main() -> None:
        async with serving(exchanges.append) as server, peer(server.port) as idle, peer(server.port) as busy:
            busy.send(get())
            await until(lambda: bool(exchanges) and server.connections == 2)
            exchanges[0].start(200, [])
            port = server.port
            async with asyncio.TaskGroup() as group:
                drained = group.create_task(server.drain(5))
                assert await idle.rest() == b""
                with pytest.raises(ConnectionRefusedError):
                    async with peer(port):
                        pass
                exchanges[0].write(b"rest")
                exchanges[0].end()
                assert (await busy.answer()).body == b"rest"
                assert await busy.rest() == b""
            assert drained.result()

    run(main())


def test_request_during_a_drain_is_answered_with_connection_close() -> None:
    exchanges: list[Exchange] = []

    async def main() -> None:
        async with serving(exchanges.append) as server, peer(server.port) as idle, peer(server.port) as busy:
            busy.send(get())
            await until(lambda: bool(exchanges) and server.connections == 2)
            exchanges[0].start(200, [])  # promises to stay open
            async with asyncio.TaskGroup() as group:
                drained = group.create_task(server.drain(30, 25))
                await until(lambda: server.common.draining)
                exchanges[0].end()
                await busy.answer()
                for client in (busy, idle):
                    client.send(get())
                await until(lambda: len(exchanges) == 3)
                for exchange in exchanges[1:]:
                    exchange.respond(200, [], b"again")
                for client in (busy, idle):
                    answer = await client.answer()
                    assert (answer.body, answer.headers[b"connection"]) == (b"again", b"close")
                    assert await client.rest() == b""
            assert drained.result()

    run(main())


def test_silent_connections_are_closed_after_their_timeout_during_a_drain() -> None:
    async def main() -> None:
        async with serving(echo, Limits(idle_timeout_s=0.2)) as server, peer(server.port) as idle:
            await until(lambda: server.connections == 1)
            assert await server.drain(30, 0.1)
            assert await idle.rest() == b""

    run(main())


def test_drain_ends_after_the_grace_period() -> None:
    exchanges: list[Exchange] = []

    async def main() -> None:
        async with serving(exchanges.append) as server, peer(server.port) as busy:
            busy.send(get())
            await until(lambda: bool(exchanges))
            assert not await server.drain(0.05)

    run(main())


def test_occupied_port_is_an_os_error_and_start_can_be_retried() -> None:
    async def main() -> None:
        other = HttpServer(echo, Limits())
        async with serving(echo) as server:
            with pytest.raises(OSError, match="in use"):
                await other.start("127.0.0.1", server.port)
        await other.start("127.0.0.1", 0)
        async with peer(other.port) as client:
            client.send(get())
            assert (await client.answer()).status == 200
        other.close()

    run(main())


def test_unsent_bytes_in_the_kernel_are_bounded_when_configured() -> None:
    most, piece = 65_536, 16_384
    waiting: list[Exchange] = []

    async def main() -> None:
        server = HttpServer(waiting.append, Limits())
        await server.start("127.0.0.1", 0, unsent_bytes_max=most)
        async with peer(server.port, receive_bytes=4096) as client:
            client.send(get())
            await until(lambda: bool(waiting))
            written = 0
            waiting[0].start(200, [])
            while not waiting[0].paused:
                waiting[0].write(b"x" * piece)
                written += piece
                await asyncio.sleep(0)
            assert written < 8 * most
        server.close()
        await until(lambda: server.connections == 0)

    run(main())
