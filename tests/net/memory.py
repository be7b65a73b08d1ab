"""Both sides of HTTP without sockets: bytes in, and the results."""

import asyncio
from typing import Any, cast

from tests.net.rig import Log, get, post

from forebay.core.errors import Code
from forebay.core.model import Limits
from forebay.net.client import Call, Pool
from forebay.net.client.upstream import CachedHead, Upstream
from forebay.net.connection import Connection
from forebay.net.outbox import UNBATCHED
from forebay.net.owner import Common
from forebay.net.server import Exchange


class Wire:
    """A transport in memory."""

    def __init__(self) -> None:
        self.sent = b""
        self.closing = False
        self.eof = False

    def write(self, data: bytes) -> None:
        assert not self.closing
        assert not self.eof
        self.sent += data

    def write_eof(self) -> None:
        self.eof = True

    def close(self) -> None:
        self.closing = True

    abort = close

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def can_write_eof(self) -> bool:
        return True

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading

    @property
    def ended(self) -> bool:
        return self.closing or self.eof


class FakeOwner:
    """A server without a socket; `late` keeps the answers until they are asked for."""

    def __init__(self, late: bool = False, common: Common | None = None) -> None:
        limits = Limits(
            header_bytes_max=3000, headers_max=20, body_bytes_max=5000, pipelined_max=8, idle_timeout_s=60
        )
        self.common = common or Common(limits, b"x-alive")
        self.late = late
        self.waiting: list[Exchange] = []
        self.seen: list[tuple[bytes, bytes, bytes]] = []

    def opened(self, connection: Connection) -> bool:
        return True

    def closed(self, connection: Connection) -> None:
        pass

    def refused(self, code: Code) -> None:
        assert code is not Code.INTERNAL

    def refusal_id(self, seen: Exchange, code: Code) -> bytes:
        return b""

    def wants_body(self, exchange: Exchange) -> bool:
        return exchange.target != b"/unwanted"

    def handle(self, exchange: Exchange) -> None:
        self.seen.append((exchange.method, exchange.target, exchange.body))
        self.waiting.append(exchange)
        if not self.late:
            self.answer()

    def answer(self) -> None:
        exchange = self.waiting.pop()
        if exchange.target == b"/stream":
            exchange.rest()
            exchange.start(200, [])
            exchange.write(exchange.body)
            exchange.end()
        else:
            exchange.respond(200, [], exchange.body)


def serve(parts: list[bytes], late: bool, common: Common | None = None) -> tuple[FakeOwner, Wire]:
    """What comes of these bytes on a connection of its own; `common` has seen others."""
    desk, wire = FakeOwner(late, common), Wire()
    asyncio.run(_serve(parts, desk, wire))
    return desk, wire


async def _serve(parts: list[bytes], desk: FakeOwner, wire: Wire) -> None:
    connection = Connection(desk)
    connection.connection_made(cast(Any, wire))
    for part in parts:
        if wire.closing:
            break
        connection.data_received(part)
        await asyncio.sleep(0)
        while desk.waiting:
            desk.answer()
            await asyncio.sleep(0)
    connection.eof_received()
    connection.connection_lost(None)


CHUNKED = b"POST /stream HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
REQUESTS = (
    get(b"/a", b"x-one:", b"x-two:   2  "),
    post(b"hello\r\n\r\nworld", b"expect: nothing"),
    CHUNKED + b"5\r\nhello\r\n6;ext=1\r\n world\r\n0\r\ntrailer: x\r\n\r\n",
    b"\r\n" + post(b"x" * 300, target=b"/stream"),
    post(b"up", b"connection: upgrade", b"upgrade: h2c"),
    post(b"x" * 60),
)


def warm() -> Common:
    """What a server has that has had all these requests."""
    desk = FakeOwner()
    for request in REQUESTS:
        serve([request], late=False, common=desk.common)
    return desk.common


class Shelf:
    """A pool without sockets."""

    def __init__(self, known: dict[bytes, CachedHead] | None = None) -> None:
        self.released = 0
        self.again_called = 0
        self.sends_1xx = False
        self.known = known if known is not None else {}
        self.counts_begin = 0
        self.outbox = UNBATCHED

    def release(self, connection: Upstream) -> None:
        self.released += 1

    def lost(self, connection: Upstream) -> None:
        pass

    def again(self, call: Call) -> None:
        self.again_called += 1


def ask(parts: list[bytes], known: dict[bytes, CachedHead] | None = None) -> tuple[Log, Wire, Shelf]:
    """What comes of these bytes as an answer; heads in `known` were read before."""
    shelf, wire, log = Shelf(known), Wire(), Log()
    upstream = Upstream(cast(Pool, shelf))
    upstream.connection_made(cast(Any, wire))
    Call(cast(Pool, shelf), b"request", log).run_on(upstream)
    for part in parts:
        if wire.closing:
            break
        upstream.data_received(part)
    if not wire.closing and not log.done:
        upstream.eof_received()
    if wire.closing or not log.done:
        upstream.connection_lost(None)
    return log, wire, shelf


ANSWERS = (
    b"HTTP/1.1 200 OK\r\ncontent-length: 12\r\nX-A:  b\r\n\r\nhello\r\n\r\nabc",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nx-u: 1,2\r\nx-v: 3\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\nx: y\r\n\r\n",
    b"HTTP/1.0 200 OK\r\n\r\nup to the end",
    b"HTTP/1.1 503 Busy\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}",
)


def warm_known() -> dict[bytes, CachedHead]:
    """The heads of all these answers, as far as they are kept."""
    known: dict[bytes, CachedHead] = {}
    for answer in ANSWERS:
        ask([answer], known)
    return known
