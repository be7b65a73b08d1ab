"""Events in the middle of a stream are passed on with lower priority: in order, completely, and no others."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from tests.net.memory import Shelf, Wire
from tests.net.rig import Log

from forebay.net.client import Call, Pool
from forebay.net.client.upstream import Upstream
from forebay.net.outbox import Outbox

pytestmark = pytest.mark.interpreted

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


def event(at: int) -> bytes:
    return b"2\r\n%d\n\r\n" % at


class Loop:
    """Runs what is to be done soon when it is told to."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []

    def time(self) -> float:
        return 0.0

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def turn(self) -> None:
        soon, self.soon = self.soon, []
        for each in soon:
            each()


class Rig:
    """One connection, with an answer that has begun."""

    def __init__(self, *parts: bytes) -> None:
        self.loop, self.shelf, self.wire, self.log = Loop(), Shelf(), Wire(), Log()
        self.shelf.outbox = Outbox(cast(asyncio.AbstractEventLoop, self.loop))
        self.upstream = Upstream(cast(Pool, self.shelf))
        self.upstream.connection_made(cast(Any, self.wire))
        self.call = Call(cast(Pool, self.shelf), b"request", self.log)
        self.call.run_on(self.upstream)
        for part in parts or (HEAD, event(1)):
            self.upstream.data_received(part)

    @property
    def said(self) -> bytes:
        return self.log.body.replace(b"\n", b"")


@pytest.mark.parametrize("parts", [(HEAD, event(1)), (HEAD + event(1),)])
def test_first_event_is_passed_on_immediately_and_later_ones_deferred(parts: tuple[bytes, ...]) -> None:
    rig = Rig(*parts)
    assert rig.said == b"1"
    rig.upstream.data_received(event(2))
    assert rig.said == b"1"
    rig.loop.turn()
    assert rig.said == b"12"
    rig.upstream.data_received(event(3) + LAST)
    assert not rig.log.done
    rig.loop.turn()
    assert rig.said == b"123"
    assert rig.log.done
    assert rig.shelf.released == 1


def test_data_before_a_deferred_event_was_passed_on_stays_behind_it() -> None:
    rig = Rig()
    for at in (2, 3, 4):
        rig.upstream.data_received(event(at))
        assert rig.said == b"1234"[: at - 1]
    rig.upstream.data_received(b"9000\r\n" + b"x" * 0x9000 + b"\r\n")
    assert rig.said == b"1234" + b"x" * 0x9000
    while rig.loop.soon:
        rig.loop.turn()
    assert rig.said == b"1234" + b"x" * 0x9000


@pytest.mark.parametrize("how", ["eof", "lost"])
def test_end_of_connection_stays_behind_a_deferred_event(how: str) -> None:
    for rest, complete in ((event(2) + LAST, True), (event(2), False)):
        rig = Rig()
        rig.upstream.data_received(rest)
        if how == "eof":
            rig.upstream.eof_received()
        rig.wire.close()
        rig.upstream.connection_lost(None)
        assert rig.said == b"12"
        assert rig.log.done
        assert (rig.log.error is None) == complete
        rig.loop.turn()
        assert rig.said == b"12"


def test_unexpected_second_response_closes_the_connection() -> None:
    rig = Rig()
    rig.upstream.data_received(event(2) + LAST)
    rig.shelf.release = lambda connection: Call(cast(Pool, rig.shelf), b"next", Log()).run_on(connection)  # type: ignore[method-assign]
    rig.upstream.data_received(HEAD + LAST)
    assert rig.log.done
    assert rig.log.error is None
    assert rig.wire.closing
    rig.upstream.connection_lost(None)
    assert rig.shelf.again_called == 1, "the next call runs on another connection"


def test_cancelled_call_gets_no_more_data() -> None:
    rig = Rig()
    rig.upstream.data_received(event(2))
    rig.call.cancel()
    rig.loop.turn()
    assert rig.said == b"1"
    rig.upstream.connection_lost(None)
