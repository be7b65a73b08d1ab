"""The HTTP client: pooling, order of callbacks, what is forwarded and what never is."""

import asyncio
import socket
from typing import cast

import pytest
from tests.net.memory import Wire
from tests.net.rig import Log, Script, Told, echo, get, pooling, post, run, scripted, serving, until

from forebay.net.client import Call, Pool
from forebay.net.client.pool import CONNECTING_MAX
from forebay.net.client.upstream import PART_BYTES, Upstream
from forebay.net.server import Exchange

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_consecutive_calls_share_one_connection() -> None:
    script = Script([OK] * 50)

    async def main() -> None:
        async with scripted(script) as port, pooling(port) as pool:
            for _ in range(50):
                log = Log()
                pool.call(get(), log)
                await until(lambda log=log: log.done)  # type: ignore[misc]
                assert (log.status, log.body, log.trailers) == (200, b"ok", [])
            assert script.accepted == 1

    run(main())


def test_greeting_headers_are_sent_once_per_connection() -> None:
    async def main() -> None:
        heard: list[bytes | None] = []

        def answer(exchange: Exchange) -> None:
            heard.append(exchange.header(b"x-whom"))
            echo(exchange)

        async with serving(answer) as server, pooling(server.port, greeting=b"x-whom: a.1\r\n") as pool:
            for several in (1, 2):
                logs = [Log() for _ in range(several)]
                for log in logs:
                    pool.call(post(b"body"), log)
                await until(lambda logs=logs: all(log.done for log in logs))  # type: ignore[misc]
                assert {log.status for log in logs} == {200}
        assert sorted(heard, key=str) == [None, b"a.1", b"a.1"]

    run(main())


def test_concurrent_calls_open_connections_and_the_latest_used_is_reused_first() -> None:
    async def main() -> None:
        async with serving(echo) as server, pooling(server.port) as pool:
            logs = [Log() for _ in range(5)]
            for log in logs:
                pool.call(get(), log)
            await until(lambda: all(log.done for log in logs))
            assert server.connections == pool.connections == 5
            last = pool._idle[-1]
            again = Log()
            pool.call(get(), again)
            assert last not in pool._idle
            await until(lambda: again.done)

    run(main())


def test_concurrent_connection_attempts_are_limited() -> None:
    async def main() -> None:
        async with serving(echo) as server, pooling(server.port) as pool:
            logs = [Log() for _ in range(3 * CONNECTING_MAX)]
            for log in logs:
                pool.call(get(), log)
            assert len(pool._connecting) == CONNECTING_MAX
            await until(lambda: all(log.done for log in logs))
            assert {log.status for log in logs} == {200}

    run(main())


def test_waiting_call_takes_a_released_connection_or_fails_with_the_others() -> None:
    async def main() -> None:
        async with pooling(closed_port()) as pool:
            logs = [Log() for _ in range(CONNECTING_MAX + 3)]
            calls = [pool.call(get(), log) for log in logs]
            gone, served = calls[CONNECTING_MAX : CONNECTING_MAX + 2]
            gone.cancel()
            upstream = Upstream(pool)
            upstream.connection_made(cast(asyncio.Transport, wire := Wire()))
            pool.release(upstream)
            assert (served.connection, wire.sent) == (upstream, get())
            others = [*logs[:CONNECTING_MAX], logs[-1]]
            await until(lambda: all(log.done for log in others))
            assert {log.error.kind for log in others if log.error} == {"connect"}
            assert not logs[CONNECTING_MAX + 1].done

    run(main())


def test_idle_connections_are_bounded_in_number_and_age() -> None:
    async def main() -> None:
        async with serving(echo) as server, pooling(server.port, idle_max=2) as pool:
            logs = [Log() for _ in range(5)]
            for log in logs:
                pool.call(get(), log)
            await until(lambda: all(log.done for log in logs) and pool.connections == 2)
        async with serving(echo) as server, pooling(server.port, idle_age_s=-1.0) as pool:
            for _ in range(2):
                log = Log()
                pool.call(get(), log)
                await until(lambda log=log: log.done and pool.connections == 0)  # type: ignore[misc]

    run(main())


def test_stream_arrives_in_pieces_with_trailers() -> None:
    def handler(exchange: Exchange) -> None:
        exchange.start(200, [(b"X-Upper", b"Kept")])
        exchange.write(b"data: 1\n\n")
        exchange.write(b"data: 2\n\n")
        exchange.end([(b"x-forebay-usage", b"1,2,3")])

    async def main() -> None:
        async with serving(handler) as server, pooling(server.port) as pool:
            log = Log()
            pool.call(get(), log)
            await until(lambda: log.done)
            assert log.body == b"data: 1\n\ndata: 2\n\n"
            assert (b"x-upper", b"Kept") in log.headers
            assert log.trailers == [(b"x-forebay-usage", b"1,2,3")]

    run(main())


def test_end_of_a_stream_may_be_split_anywhere() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nx-forebay-usage: 9,0,\r\n\r\n"
    end = b"0\r\nx-forebay-usage: 1,2,3\r\n\r\n"

    async def split(pool: Pool, cut: int) -> Log:
        log = Log()
        call = pool.call(get(), log)
        await until(lambda: log.status == 200)
        upstream = call.connection
        assert upstream is not None
        for part in (b"1\r\n.\r\n", end[:cut], end[cut:]):
            upstream.data_received(part)
        await until(lambda: log.done)
        return log

    async def main() -> None:
        async with scripted(Script([head] * len(end))) as port, pooling(port) as pool:
            for cut in range(1, len(end)):
                log = await split(pool, cut)
                assert (log.body, log.trailers) == (b".", [(b"x-forebay-usage", b"1,2,3")])

    run(main())


@pytest.mark.parametrize("steps", [[None], [b"", None]])
def test_stale_pooled_connection_is_replaced_once(steps: list[bytes | None]) -> None:
    script = Script([OK, *steps], [OK])

    async def main() -> None:
        async with scripted(script) as port, pooling(port) as pool:
            for _ in range(2):
                log = Log()
                pool.call(get(), log)
                await until(lambda log=log: log.done)  # type: ignore[misc]
                assert log.error is None
            assert script.accepted == 2

    run(main())


def test_fresh_connection_closed_without_response_is_not_retried() -> None:
    script = Script([b"", None])

    async def main() -> None:
        async with scripted(script) as port, pooling(port) as pool:
            log = Log()
            pool.call(get(), log)
            await until(lambda: log.done)
            assert log.error is not None
            assert (log.error.kind, log.error.sent) == ("lost", True)
            assert script.accepted == 1

    run(main())


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", b"half"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n", b"half"),
        (b"HTTP/1.1 200 OK\r\ncont", b""),
    ],
)
def test_truncated_response_is_lost(answer: bytes, body: bytes) -> None:
    async def main() -> None:
        async with scripted(Script([answer, None])) as port, pooling(port) as pool:
            log = Log()
            pool.call(get(), log)
            await until(lambda: log.done)
            assert log.error is not None
            assert (log.error.kind, log.body) == ("lost", body)

    run(main())


def test_response_without_length_ends_with_the_connection() -> None:
    async def main() -> None:
        async with scripted(Script([b"HTTP/1.1 200 OK\r\n\r\nto the end", None])) as port, pooling(port) as pool:
            log = Log()
            pool.call(get(), log)
            await until(lambda: log.done)
            assert (log.body, log.trailers) == (b"to the end", [])

    run(main())


@pytest.mark.parametrize(
    "answer",
    [b"rubbish\r\n\r\n", b"HTTP/1.1 101 Hm\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n", b"x: y\r\n" * 20_000],
)
def test_non_http_response_is_a_protocol_error(answer: bytes) -> None:
    async def main() -> None:
        async with scripted(Script([answer])) as port, pooling(port) as pool:
            log = Log()
            pool.call(get(), log)
            await until(lambda: log.done and pool.connections == 0)
            assert log.error is not None
            assert log.error.kind == "protocol"

    run(main())


def test_endless_response_head_is_a_protocol_error() -> None:
    async def main() -> None:
        async with scripted(Script([b"HTTP/1.1 200 OK\r\nx: " + b"y" * 300_000])) as port, pooling(port) as pool:
            log = Log()
            pool.call(get(), log)
            await until(lambda: log.done)
            assert log.error is not None
            assert log.error.kind == "protocol"

    run(main())


@pytest.mark.parametrize("extra", [b"garbage", OK, b"\r\nHTTP/1.1 200 OK\r\nx: "])
def test_bytes_after_the_response_are_dropped_and_close_the_connection(extra: bytes) -> None:
    script = Script([OK + extra], [OK])

    async def main() -> None:
        async with scripted(script) as port, pooling(port) as pool:
            for n in (1, 2):
                log = Log()
                pool.call(get(), log)
                await until(lambda log=log: log.done)  # type: ignore[misc]
                assert (log.body, log.error) == (b"ok", None)
                assert script.accepted == n

    run(main())


def test_bytes_behind_a_large_response_do_not_reach_the_next_call() -> None:
    async def main() -> None:
        async with pooling(closed_port()) as pool:
            wire, first, second = Wire(), Log(), Log()
            upstream = Upstream(pool)
            upstream.connection_made(cast(asyncio.Transport, wire))
            Call(pool, get(), first).run_on(upstream)
            head = b"HTTP/1.1 200 OK\r\ncontent-length: %06d\r\n\r\n"
            body = b"x" * (3 * PART_BYTES - len(head % 0))
            first.on_end = lambda trailers: Call(pool, get(), second).run_on(upstream)  # type: ignore[method-assign]
            upstream.data_received(head % len(body) + body + OK)
            assert (first.body, first.status) == (body, 200)
            assert (second.status, second.done, wire.closing) == (0, False, True)

    run(main())


def test_data_read_while_the_sink_is_paused_is_kept_until_it_resumes() -> None:
    async def main() -> None:
        async with pooling(closed_port()) as pool:
            upstream, log = Upstream(pool), Log()
            upstream.connection_made(cast(asyncio.Transport, Wire()))
            call = Call(pool, get(), log)
            call.run_on(upstream)
            body = b"x" * (5 * PART_BYTES)
            call.pause()
            upstream.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            assert (log.status, log.body) == (0, b"")
            call.resume()
            assert (log.body, log.done, pool._idle[0]) == (body, True, upstream)

    run(main())


def test_interim_responses_are_dropped() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"

    async def main() -> None:
        async with scripted(Script([interim + OK, OK])) as port, pooling(port) as pool:
            for _ in range(2):
                log = Log()
                pool.call(get(), log)
                await until(lambda log=log: log.done)  # type: ignore[misc]
                assert (log.status, log.body, log.headers) == (200, b"ok", [(b"content-length", b"2")])

    run(main())


@pytest.mark.parametrize("answer", [b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 304 Not Modified\r\n\r\n"])
def test_responses_without_a_body_end_after_their_head(answer: bytes) -> None:
    script = Script([answer, OK])

    async def main() -> None:
        async with scripted(script) as port, pooling(port) as pool:
            for status in (int(answer[9:12]), 200):
                log = Log()
                pool.call(get(), log)
                await until(lambda log=log: log.done)  # type: ignore[misc]
                assert log.status == status
            assert script.accepted == 1

    run(main())


def test_connection_with_close_header_is_not_reused() -> None:
    script = Script([OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")])

    async def main() -> None:
        async with scripted(script) as port, pooling(port) as pool:
            for n in (1, 2):
                log = Log()
                pool.call(get(), log)
                await until(lambda log=log: log.done)  # type: ignore[misc]
                assert (log.body, script.accepted) == (b"ok", n)

    run(main())


def test_closed_port_is_a_connect_error() -> None:
    async def main() -> None:
        async with pooling(closed_port()) as pool:
            log = Log()
            pool.call(get(), log)
            await until(lambda: log.done)
            assert log.error is not None
            assert (log.error.kind, log.error.sent) == ("connect", False)

    run(main())


def test_unresponsive_address_fails_after_the_connect_timeout() -> None:
    async def main() -> None:
        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            port = full.getsockname()[1]
            filler = [socket.socket() for _ in range(4)]
            for sock in filler:  # the kernel drops attempts once the backlog is full
                sock.setblocking(False)
                sock.connect_ex(("127.0.0.1", port))
            async with pooling(port, connect_timeout_s=0.1) as pool:
                log = Log()
                pool.call(get(), log)
                await until(lambda: log.done)
                assert log.error is not None
                assert log.error.kind == "connect"
            for sock in filler:
                sock.close()

    run(main())


def test_cancel_closes_the_connection_without_further_callbacks() -> None:
    exchanges: list[Exchange] = []
    gone: list[int] = []

    async def main() -> None:
        async with serving(exchanges.append) as server, pooling(server.port) as pool:
            for begun in (False, True):
                log = Log()
                call = pool.call(get(), log)
                exchanges.clear()
                await until(lambda: bool(exchanges))
                exchanges[0].on_disconnect = lambda: gone.append(1)
                if begun:
                    exchanges[0].start(200, [])
                    exchanges[0].write(b"x")
                    await until(lambda log=log: bool(log.body))  # type: ignore[misc]
                call.cancel()
                gone.clear()
                await until(lambda: gone == [1])
                assert not log.done
                call.cancel()

    run(main())


def test_cancel_while_connecting_sends_nothing() -> None:
    async def main() -> None:
        async with serving(echo) as server, pooling(server.port) as pool:
            log = Log()
            pool.call(get(), log).cancel()
            await until(lambda: pool.connections == 1)
            later = Log()
            pool.call(get(), later)
            await until(lambda: later.done)
            assert not log.done
            assert pool.connections == 1

    run(main())


def test_paused_call_applies_backpressure_to_the_upstream() -> None:
    exchanges: list[Exchange] = []
    told: list[str] = []

    async def main() -> None:
        async with serving(exchanges.append) as server, pooling(server.port) as pool:
            log = Log()
            call = pool.call(get(), log)
            await until(lambda: bool(exchanges))
            exchange = exchanges[0]
            exchange.source = Told(told)
            exchange.start(200, [])
            await until(lambda: log.status == 200)
            call.pause()
            call.pause()
            written = 0
            while not told:
                exchange.write(b"x" * 100_000)
                written += 100_000
                await asyncio.sleep(0)
            assert len(log.body) < written
            call.resume()
            await until(lambda: told == ["pause", "resume"])
            exchange.end()
            await until(lambda: log.done)
            assert len(log.body) == written
            after = Log()
            pool.call(get(), after)
            await until(lambda: len(exchanges) == 2)
            assert pool.connections == 1

    run(main())


def test_closing_the_pool_fails_calls_in_flight() -> None:
    exchanges: list[Exchange] = []

    async def main() -> None:
        async with serving(exchanges.append) as server, pooling(server.port) as pool:
            sent, unsent, late = Log(), Log(), Log()
            pool.call(get(), sent)
            await until(lambda: bool(exchanges))
            pool.call(get(), unsent)
            pool.close()
            await until(lambda: sent.done and unsent.done)
            assert sent.error is not None
            assert sent.error.kind == "lost"
            assert unsent.error is not None
            assert unsent.error.kind == "connect"
            pool.call(get(), late)
            assert not late.done
            await until(lambda: late.error is not None)

    run(main())


def test_large_request_arrives_completely() -> None:
    async def main() -> None:
        async with serving(echo) as server, pooling(server.port) as pool:
            log = Log()
            pool.call(post(b"x" * 5_000_000), log)
            await until(lambda: log.done)
            assert log.body.startswith(b"POST / 5000000 xx")

    run(main())
