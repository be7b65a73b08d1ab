"""The HTTP client's idle timeout: silent upstreams time out, working ones do not; errors in sinks stay isolated."""

import asyncio
import socket
from typing import Any, cast

import pytest
from tests.net.memory import FakeOwner, Shelf, Wire
from tests.net.rig import Log, Script, get, pooling, run, scripted, serving, until

from forebay.core.model import Limits
from forebay.net import connection
from forebay.net.client import Call, Header, Pool
from forebay.net.client.upstream import ALIVE_SILENCE_S, FAILURE_S, SILENCE_S, Upstream
from forebay.net.connection import ALIVE_S, PROCESSING, Connection
from forebay.net.server import Exchange

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
HALF = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"
BUSY = b"HTTP/1.1 503 Busy\r\nx-forebay-retryable: 1\r\ntransfer-encoding: chunked\r\n\r\n"


class Asked:
    """A call that was sent, without a socket."""

    def __init__(self) -> None:
        self.shelf, self.wire, self.log = Shelf(), Wire(), Log()
        self.upstream = Upstream(cast(Pool, self.shelf))
        self.upstream.connection_made(cast(Any, self.wire))
        self.now = 1000.0
        self.again()

    def again(self) -> None:
        self.log = Log()
        self.call = Call(cast(Pool, self.shelf), b"request", self.log)
        self.call.run_on(self.upstream)

    def given_up_after_s(self, drip: bytes = b"", patience_s: float = 2 * SILENCE_S) -> float:
        """How long it takes, with so much coming in every second; infinite if it does not happen."""
        began = self.now
        while self.log.error is None:
            if self.now - began > patience_s:
                return float("inf")
            self.now += 1.0
            self.upstream.sweep(self.now)
            if drip and not self.wire.closing:
                self.upstream.data_received(drip)
        assert self.wire.closing
        assert (self.log.error.kind, self.log.error.sent) == ("lost", True)
        return self.now - began


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("first", "drip", "after_s"),
    [
        (b"", b"", SILENCE_S),
        (HALF, b"", SILENCE_S),
        (PROCESSING, b"", ALIVE_SILENCE_S),
        (PROCESSING + HALF, b"", SILENCE_S),
        (BUSY, b"", FAILURE_S),
        (BUSY, b"1\r\n.\r\n", FAILURE_S),
        (b"", PROCESSING, float("inf")),
        (HALF.replace(b"9", b"9000"), b".", float("inf")),
    ],
)
def test_silent_response_times_out(first: bytes, drip: bytes, after_s: float) -> None:
    asked = Asked()
    if first:
        asked.upstream.data_received(first)
    assert asked.given_up_after_s(drip) == pytest.approx(after_s, abs=3.0)


@pytest.mark.interpreted
def test_a_paused_response_does_not_count_as_silent() -> None:
    asked = Asked()
    asked.upstream.data_received(HALF)
    asked.call.pause()
    assert asked.given_up_after_s() == float("inf")
    asked.call.resume()
    assert asked.given_up_after_s() == pytest.approx(SILENCE_S, abs=3.0)


@pytest.mark.interpreted
def test_timeout_restarts_per_call_and_does_not_apply_to_idle_connections() -> None:
    asked = Asked()
    asked.now += SILENCE_S - 5.0
    asked.upstream.sweep(asked.now)
    asked.upstream.data_received(OK)
    assert asked.log.done
    for _ in range(3):
        asked.now += SILENCE_S
        asked.upstream.sweep(asked.now)
    assert not asked.wire.closing
    asked.again()
    assert asked.given_up_after_s() == pytest.approx(SILENCE_S, abs=3.0)


@pytest.mark.interpreted
@pytest.mark.parametrize(("part", "again"), [(b"", 1), (HALF, 0)])
def test_only_a_call_without_any_response_bytes_is_retried(part: bytes, again: int) -> None:
    asked = Asked()
    asked.upstream.data_received(OK)
    asked.again()
    if part:
        asked.upstream.data_received(part)
    for _ in range(3):
        asked.now += 1.0
        asked.upstream.sweep(asked.now)
    asked.upstream.connection_lost(None)
    assert asked.shelf.again_called == again
    assert asked.log.done is not bool(again)


def test_pool_times_out_silent_calls_and_keeps_serving() -> None:
    script = Script([b""], [OK])

    async def main() -> None:
        async with scripted(script) as port, pooling(port) as pool:
            silent, well = Log(), Log()
            pool.call(get(), silent)
            await until(lambda: bool(script.reads))
            now = asyncio.get_running_loop().time()
            for at in (now, now + 0.1, now + SILENCE_S / 2, now + SILENCE_S + 3.0):
                assert not silent.done
                pool.sweep(at)
            assert silent.error is not None
            assert silent.error.kind == "lost"
            pool.call(get(), well)
            await until(lambda: well.done)
            assert well.status == 200

    run(main())


def test_upstream_connections_use_tcp_keepalive() -> None:
    script = Script([OK])

    async def main() -> None:
        async with scripted(script) as port, pooling(port) as pool:
            log = Log()
            pool.call(get(), log)
            await until(lambda: log.done)
            [upstream] = pool._open
            sock = upstream.transport.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    run(main())


# --- signs of life, by the server


@pytest.mark.interpreted
@pytest.mark.parametrize(("fields", "signs"), [((b"x-alive: 1",), 2), ((), 0)])
def test_server_sends_102_to_clients_that_request_it(fields: tuple[bytes, ...], signs: int) -> None:
    desk, wire = FakeOwner(late=True), Wire()
    line = Connection(desk)
    line.connection_made(cast(Any, wire))
    line.data_received(get(b"/stream", *fields))
    for _ in range(5):
        desk.common.now += 0.5 * ALIVE_S
        line.sweep(desk.common.now + 0.1)
    assert wire.sent == PROCESSING * signs
    desk.answer()
    desk.common.now += 2 * ALIVE_S
    line.sweep(desk.common.now)
    assert wire.sent.count(PROCESSING) == signs


@pytest.mark.interpreted
def test_no_102_is_sent_after_the_response_has_begun() -> None:
    desk, wire = FakeOwner(late=True), Wire()
    line = Connection(desk)
    line.connection_made(cast(Any, wire))
    line.data_received(get(b"/stream", b"x-alive: 1"))
    desk.waiting[0].start(200, [])
    line.sweep(2 * ALIVE_S)
    assert PROCESSING not in wire.sent


@pytest.mark.interpreted
def test_client_accepts_102_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ALIVE_S", 0.02)
    waiting: list[Exchange] = []

    async def main() -> None:
        limits = Limits(write_timeout_s=0.1)
        async with serving(waiting.append, limits, alive_for=b"x-alive") as server, pooling(server.port) as pool:
            log = Log()
            pool.call(get(b"/", b"x-alive: 1"), log)
            await until(lambda: pool.sends_1xx)
            waiting[0].respond(200, [], b"at last")
            await until(lambda: log.done)
            assert (log.status, log.body) == (200, b"at last")

    run(main())


# --- mistakes of sinks


class Broken(Log):
    """A sink with a mistake in one of its methods."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def _trip(self, where: str) -> None:
        if where == self.where:
            raise RuntimeError(f"a mistake in {where}")

    def on_head(self, status: int, headers: list[Header]) -> None:
        self._trip("on_head")
        super().on_head(status, headers)

    def on_body(self, data: bytes) -> None:
        self._trip("on_body")
        super().on_body(data)

    def on_end(self, trailers: list[Header]) -> None:
        self._trip("on_end")
        super().on_end(trailers)


@pytest.mark.parametrize("where", ["on_head", "on_body", "on_end"])
def test_exception_in_a_sink_fails_only_its_call(where: str) -> None:
    told: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        async with scripted(Script([OK, OK], [OK])) as port, pooling(port) as pool:
            broken, well = Broken(where), Log()
            pool.call(get(), broken)
            await until(lambda: broken.done)
            assert broken.error is not None
            assert broken.error.kind == "protocol"
            assert told == ["handling an answer failed"]
            pool.call(get(), well)
            await until(lambda: well.done)
            assert well.body == b"ok"

    run(main())


def test_exception_in_on_error_does_not_stop_the_connector() -> None:
    told: list[str] = []

    class Worse(Log):
        def on_error(self, error: object) -> None:
            raise RuntimeError("a mistake in on_error")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        async with scripted(Script([OK])) as port, pooling(port) as pool:
            closed, well = Worse(), Log()
            async with pooling(1) as nobody:
                nobody.call(get(), closed)
                await until(lambda: bool(told))
            pool.call(get(), well)
            await until(lambda: well.done)
        assert told == ["handling an answer failed"]

    run(main())
