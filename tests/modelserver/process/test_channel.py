"""Both ends of a channel in one process: segments that are reused, and invalid packets."""

import array
import asyncio
import gc
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import USUAL
from tests.modelserver.process.rig import BACKEND, spec

from forebay.core.serving.config import Datatype
from forebay.core.serving.values import Tensor
from forebay.engines.tensor import BACKENDS
from forebay.modelserver.process import channel, encoding, link, segments
from forebay.modelserver.process.channel import Channel, ChannelBroken, Received
from forebay.modelserver.process.child.running import Child
from forebay.modelserver.process.link import Link
from forebay.modelserver.process.messages import (
    Cancel,
    Configure,
    Emitted,
    Execute,
    Ping,
    Pong,
    Reply,
    Stop,
    ToChild,
    ToServer,
)
from forebay.modelserver.process.segments import SegmentBroken, Sharing
from forebay.modelserver.process.values import Answer, Work

Ends = tuple[Channel[ToServer], Channel[ToChild]]
BIG = 1 << 20


@pytest.fixture
def ends() -> Iterator[Ends]:
    server, child = _pair()
    yield server, child
    server.close()
    child.close()


def _pair() -> Ends:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    return Channel(ours, ToServer, Sharing.BOTH), Channel(theirs, ToChild, Sharing.READ)


def _send(sender: Channel[Any], size: int = BIG, fill: int = 1) -> None:
    tensor = Tensor("x", Datatype.UINT8, (size,), bytes([fill]) * size)
    asks, parcel = encoding.asks(sender, [Work("", (tensor,))])
    sender.send(*sender.pack(Execute(1, *asks), parcel))


def _data(received: Received[ToChild]) -> memoryview:
    assert isinstance(received.message, Execute)
    piece = received.message.asks[0].inputs[0]
    return received.parts[piece.part][piece.offset : piece.offset + piece.size]


def _memory_files() -> int:
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.path.lexists(link) and "memfd" in os.readlink(link) for link in links)


def test_segment_is_reused_after_it_was_read(ends: Ends) -> None:
    server, child = ends
    for fill in range(5):
        _send(server, fill=fill)
        received = child.receive()
        assert set(_data(received)) == {fill}
        del received
        child.send(*child.pack(Pong()))
        assert isinstance(server.receive().message, Pong)
    assert _memory_files() == 3  # one segment: a map at both ends, and a descriptor at the one that lends it


def test_segment_being_read_is_not_reused(ends: Ends) -> None:
    server, child = ends
    held = []
    for fill in range(3):
        _send(server, fill=fill)
        held.append(_data(child.receive()))
        child.send(*child.pack(Pong()))
        server.receive()
    assert [set(view) for view in held] == [{0}, {1}, {2}]
    assert child.borrowed_bytes == 3 * 2 * BIG  # with its alignment 1 MiB takes a segment of 2


def test_free_segments_beyond_the_limit_are_released(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "KEPT_BYTES_MAX", 3 << 20)
    server, child = ends
    for _ in range(2):
        _send(server)
        _send(server)
        held = [child.receive(), child.receive()]
        del held
        child.send(*child.pack(Pong()))
        server.receive()
        server.send(*server.pack(Ping()))
        child.receive()
        gc.collect()
        assert _memory_files() == 3


def test_writes_to_a_private_mapping_are_not_seen_by_later_readers() -> None:
    first, first_child = _pair()
    second, second_child = _pair()
    data = np.arange(BIG, dtype=np.uint8)
    parcel = first_child.parcel(BIG + 64)
    part, offset = parcel.put(data.data, BIG)
    piece = (("x", Datatype.UINT8, (BIG,), part, offset, BIG),)
    first_child.send(*first_child.pack(Emitted(1, 0, msgspec.convert((piece,), Reply), True), parcel))
    received = first.receive()
    assert isinstance(received.message, Emitted)
    assert received.message.reply is not None
    output = encoding.answer(received.message.reply, received.parts).outputs[0]
    assert output.data.readonly  # type: ignore[union-attr]
    for _ in range(2):
        asks, passed = encoding.asks(second, [Work("", (output,)), Work("", (output,))])
        second.send(*second.pack(Execute(1, *asks), passed))
        view = _data(second_child.receive())
        assert view[:3] == b"\0\1\2"
        view[:3] = b"abc"
        del view
        assert bytes(output.data[:3]) == b"\0\1\2"
        second_child.send(*second_child.pack(Pong()))
        second.receive()
    for end in (first, first_child, second, second_child):
        end.close()


def test_segment_size_is_limited(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES_MAX", BIG)
    with pytest.raises(SegmentBroken, match="more than the limit"):
        _send(ends[0], 2 * BIG)


@settings(max_examples=USUAL)
@given(st.binary(min_size=1, max_size=300))
def test_random_bytes_break_the_channel(data: bytes) -> None:
    server, child = _pair()
    child.socket.send(data)
    with pytest.raises(ChannelBroken):
        server.receive()
    server.close()
    child.close()


def _packet(*head: object, message: object = ("Pong",)) -> bytes:
    described = msgspec.msgpack.encode((head, message))
    return described + len(described).to_bytes(4, "big")


def _memory(size: int, *, sealed: bool) -> int:
    fd = os.memfd_create("odd", os.MFD_ALLOW_SEALING)
    os.truncate(fd, size)
    if sealed:
        import fcntl

        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, segments.SEALS)
    return fd


ODD: dict[str, tuple[bytes, list[tuple[int, bool]]]] = {
    "a lease of nothing": (_packet((), 0, (7,), ()), []),
    "a segment nobody knows": (_packet(((1, 5, 65536, 0),), 0, (), ()), []),
    "a segment without its descriptor": (_packet(((1, 5, 65536, 2),), 0, (), ()), []),
    "a segment that could shrink": (_packet(((1, 5, 65536, 2),), 0, (), ()), [(65536, False)]),
    "a segment that is too short": (_packet(((1, 5, 65536, 2),), 0, (), ()), [(4096, True)]),
    "a segment of no size": (_packet(((1, 5, -1, 2),), 0, (), ()), [(4096, True)]),
    "something unknown forgotten": (_packet((), 0, (), (5,)), []),
    "a spilled packet without its file": (channel.SPILLED.to_bytes(4, "big"), []),
    "a spilled packet that is empty": (channel.SPILLED.to_bytes(4, "big"), [(0, True)]),
    "an unknown message": (_packet((), 0, (), (), message=("Pung",)), []),
    "a descriptor too many": (b"?" * 8, [(4096, True)]),
    "a descriptor behind an empty spilled packet": (channel.SPILLED.to_bytes(4, "big"), [(0, True), (4096, True)]),
    "a packet that is too long": (bytes(channel.PACKET_BYTES_MAX + 8), [(4096, True)]),
}


@pytest.mark.parametrize("case", ODD)
def test_invalid_packet_breaks_the_channel_without_leaks(ends: Ends, case: str) -> None:
    server, child = ends
    packet, files = ODD[case]
    fds = [_memory(size, sealed=sealed) for size, sealed in files]
    child.socket.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
    for fd in fds:
        os.close(fd)
    with pytest.raises(ChannelBroken):
        server.receive()
    assert _memory_files() == 0


@pytest.mark.parametrize("piece", [(1, 0, 4), (0, 2, 4), (0, -2, 4), (0, 0, 5), (-7, 0, 1)])
def test_tensor_outside_the_sent_segments_breaks_the_channel(piece: tuple[int, int, int]) -> None:
    with pytest.raises(ChannelBroken):
        encoding.tensors([msgspec.convert(("x", "UINT8", (4,), *piece), encoding.Piece)], [memoryview(b"1234")])


def test_unread_messages_are_queued_and_not_lost() -> None:
    async def scene() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        told: list[str] = []
        end = Link(ours, lambda received: None, told.append)
        child = Channel[ToChild](theirs, ToChild, Sharing.READ)
        for number in range(2000):
            end.send(Cancel(0, number, 0))
        got: list[ToChild] = []
        theirs.setblocking(False)
        while len(got) < 2000:
            try:
                got.append(child.receive().message)
            except BlockingIOError:
                await asyncio.sleep(0)
        assert [message.batch for message in got if isinstance(message, Cancel)] == list(range(2000))
        assert not told
        end.close()
        end.send(Ping())
        child.close()

    asyncio.run(scene())


def test_link_breaks_when_the_child_never_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "BACKLOG_PACKETS_MAX", 10)

    async def scene() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        told: list[str] = []
        end = Link(ours, lambda received: None, told.append)
        with theirs:
            tensor = Tensor("x", Datatype.UINT8, (BIG,), bytes(BIG))
            while not end.closed:
                asks, parcel = encoding.asks(end.channel, [Work("", (tensor,))])
                end.send(Execute(1, *asks), parcel, theirs.fileno())
        await asyncio.sleep(0)
        assert told == ["the model process does not read its packets"]

    asyncio.run(scene())


def test_response_to_a_model_call_is_encoded_as_a_reply() -> None:
    server, child = _pair()
    reply, parcel = encoding.reply(server, Answer((Tensor("y", Datatype.UINT8, (2,), b"ab"),), {"k": 1}))
    assert (reply.outputs[0].size, reply.parameters, parcel is None) == (2, {"k": 1}, False)
    server.close()
    child.close()


def test_child_that_is_stopped_as_it_starts_closes_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "rig", ("rig_backend", "RigBackend", ""))
    monkeypatch.syspath_prepend(BACKEND)
    told = spec(tmp_path, parameters={"threads": "no"})
    for _ in range(50):  # the thread that reads this may end before or after the main thread looks
        server, ours = _pair()
        ours.socket.setblocking(True)
        child = Child(ours)
        child.load(Configure(told.backend, told.config, str(tmp_path), 0, told.document))
        server.send(*server.pack(Stop()))
        child.serve()
        (tmp_path / "closed").unlink()
        server.close()
        ours.close()
