"""Writes of one event-loop iteration are sent together at its end: in order, none lost, none late."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, cast

import pytest
from tests.net.rig import get, peer, run, serving, until

from forebay.net.outbox import AT_ONCE, JOINED_BYTES_MAX, LATELY_S, SOME, TOGETHER, UNBATCHED, Outbox, Sender
from forebay.net.server import Exchange


class Wire:
    """A transport that sends_1xx when it was written to."""

    def __init__(self, log: list[tuple[str, bytes]], name: str, *, broken: bool = False) -> None:
        self.log = log
        self.name = name
        self.broken = broken
        self.aborted = False

    def write(self, data: bytes) -> None:
        if self.broken:
            raise RuntimeError("closed")
        self.log.append((self.name, data))

    def abort(self) -> None:
        self.aborted = True


def sender(outbox: Outbox, wire: Wire) -> Sender:
    made = Sender(outbox)
    made.transport = cast(asyncio.Transport, wire)
    return made


def test_writes_of_an_iteration_are_sent_together_at_its_end() -> None:
    async def main() -> None:
        log: list[tuple[str, bytes]] = []
        outbox = Outbox(asyncio.get_running_loop())
        a, b = sender(outbox, Wire(log, "a")), sender(outbox, Wire(log, "b"))
        for piece in (b"1", b"2"):
            a.put(piece)
            b.put(piece)
        assert log == []
        await asyncio.sleep(0)
        assert log == [("a", b"12"), ("b", b"12")]
        a.put(b"3")
        await asyncio.sleep(0)
        assert log[2:] == [("a", b"3")]

    run(main())


class Loop:
    """As much of an event loop as an outbox has to do with."""

    def __init__(self) -> None:
        self.now = 1.0
        self.soon: list[Callable[[], None]] = []

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)


def test_few_writes_are_sent_at_once_and_many_are_batched() -> None:
    loop, log = Loop(), list[tuple[str, bytes]]()
    outbox = Outbox(cast(asyncio.AbstractEventLoop, loop))
    names = [str(at) for at in range(2 * AT_ONCE)]
    senders = [sender(outbox, Wire(log, name)) for name in names]
    for each in senders:
        each.send(b"x")
    assert [name for name, _ in log] == names[:AT_ONCE]
    loop.soon.pop()()
    assert [name for name, _ in log] == names
    loop.now += LATELY_S / 2
    senders[0].send(b"y")
    assert len(log) == len(names), "the round before had much, and so may this one"
    loop.soon.pop()()
    loop.now += LATELY_S / 2
    senders[0].send(b"z")
    assert log[-1] == ("0", b"z"), "the round before had little"
    for each in senders:
        each.send(b"x")
    loop.soon.pop()()
    loop.now += LATELY_S
    senders[0].send(b"z")
    assert log[-1] == ("0", b"z"), "that was long ago"
    assert not loop.soon


def test_order_is_kept_between_batched_and_immediate_writes() -> None:
    async def main() -> None:
        log: list[tuple[str, bytes]] = []
        one = sender(Outbox(asyncio.get_running_loop()), Wire(log, "a"))
        one.put(b"1")
        one.send(b"2")
        large = b"3" * JOINED_BYTES_MAX
        one.put(large)
        assert log == [("a", b"12"), ("a", large)], "much is not collected"
        one.put(b"4")
        one.leave()
        assert log[-1] == ("a", b"4")
        await asyncio.sleep(0)
        assert len(log) == 3

    run(main())


def test_broken_connection_does_not_affect_writes_of_others() -> None:
    async def main() -> None:
        log: list[tuple[str, bytes]] = []
        told: list[Any] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context["message"]))
        outbox, broken = Outbox(loop), Wire(log, "a", broken=True)
        sender(outbox, broken).put(b"1")
        sender(outbox, Wire(log, "b")).put(b"1")
        await asyncio.sleep(0)
        assert log == [("b", b"1")]
        assert broken.aborted
        assert told == ["a connection failed"]

    run(main())


class Follower(Sender):
    """Sends something as soon as it may go on, of which it keeps a log."""

    def __init__(self, outbox: Outbox, log: list[tuple[str, bytes]], name: str, *, broken: bool = False) -> None:
        super().__init__(outbox)
        self.transport = cast(asyncio.Transport, Wire(log, name))
        self.broken = broken
        self.went_on = 0

    def process_deferred(self) -> None:
        if self.broken:
            raise RuntimeError("broken")
        self.went_on += 1
        self.put(b"x")


@pytest.mark.interpreted
def test_deferred_work_runs_in_small_batches_and_is_sent_together() -> None:
    loop, log = Loop(), list[tuple[str, bytes]]()
    outbox = Outbox(cast(asyncio.AbstractEventLoop, loop))
    some = [Follower(outbox, log, str(at)) for at in range(2 * SOME + 1)]
    for each in some:
        outbox.defer(each)
    assert len(loop.soon) == 1
    for gone_on in (SOME, 2 * SOME):
        loop.soon.pop()()
        assert [each.went_on for each in some] == [1] * gone_on + [0] * (len(some) - gone_on)
        assert log == []
        assert len(loop.soon) == 1, "the loop looks for more urgent things in between"
    loop.soon.pop()()
    assert log == [(str(at), b"x") for at in range(len(some))]
    assert not loop.soon


@pytest.mark.interpreted
def test_deferred_batches_grow_with_the_backlog_and_do_not_wait_for_new_arrivals() -> None:
    loop, log = Loop(), list[tuple[str, bytes]]()
    outbox = Outbox(cast(asyncio.AbstractEventLoop, loop))
    waiting = 2 * TOGETHER
    every = [Follower(outbox, log, str(at)) for at in range(4 * TOGETHER)]
    coming = iter(every)
    for _ in range(waiting):
        outbox.defer(next(coming))
    while not log:
        before = sum(each.went_on for each in every)
        loop.soon.pop()()
        gone_on = sum(each.went_on for each in every)
        assert gone_on - before == waiting // 4
        for _ in range(gone_on - before):
            outbox.defer(next(coming))
    assert len(log) == TOGETHER


@pytest.mark.interpreted
def test_failing_deferred_connection_does_not_block_others() -> None:
    async def main() -> None:
        log: list[tuple[str, bytes]] = []
        told: list[Any] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context["message"]))
        outbox = Outbox(loop)
        broken, other = Follower(outbox, log, "a", broken=True), Follower(outbox, log, "b")
        outbox.defer(broken)
        outbox.defer(other)
        await asyncio.sleep(0)
        assert log == [("b", b"x")]
        assert cast(Any, broken.transport).aborted
        assert told == ["a connection failed"]

    run(main())


def test_writes_without_a_loop_are_immediate() -> None:
    log: list[tuple[str, bytes]] = []
    one = sender(UNBATCHED, Wire(log, "a"))
    for _ in range(2 * AT_ONCE):
        one.send(b"s")
        one.put(b"p")
    assert log == [("a", b"s"), ("a", b"p")] * 2 * AT_ONCE


@pytest.mark.parametrize("keep_alive", [True, False])
def test_pending_response_is_sent_before_its_connection_closes(keep_alive: bool) -> None:
    """All answers of a round are held back, and some of their connections are closed in the same round."""
    clients = 4 * AT_ONCE

    async def main() -> None:
        waiting: list[Exchange] = []
        async with serving(waiting.append) as server, contextlib.AsyncExitStack() as stack:
            peers = [await stack.enter_async_context(peer(server.port)) for _ in range(clients)]
            for each in peers:
                each.send(get(b"/", *(() if keep_alive else (b"connection: close",))))
            await until(lambda: len(waiting) == clients)
            for exchange in waiting:
                exchange.start(200, [])
                exchange.write(b"piece")
                exchange.end()
            for each in peers:
                assert (await each.answer()).body == b"piece"
                if not keep_alive:
                    assert await each.rest() == b""

    run(main())
