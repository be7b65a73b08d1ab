"""RFC 9113 and RFC 7541 on clients that violate the protocol, or are merely unusual, by section.

The cases are those of the tool h2spec that are not in `test_session`. Streams: 1 is open, 3 has been answered, 5 is
half-closed (the client has ended it, its response is pending), 7 was answered before its client had ended it, 9
was reset by the client, and 11 is idle."""

from collections.abc import Sequence
from typing import Final

import pytest
from hpack import Encoder
from tests.wire.http2.peer import REQUEST, START, Peer, request, reset, window

from forebay.wire.http2 import frames as h2
from forebay.wire.http2 import streams
from forebay.wire.http2.headers import Header

E, S = h2.END_HEADERS, h2.END_STREAM
OPEN, ANSWERED, HALF_CLOSED, CUT, RESET, IDLE = 1, 3, 5, 7, 9, 11


def standing() -> Peer:
    """A connection with those streams."""
    peer = Peer()
    peer.send(h2.frame(h2.HEADERS, E, OPEN, block()))
    peer.ask(ANSWERED).answer()
    peer.ask(HALF_CLOSED)
    peer.send(h2.frame(h2.HEADERS, E, CUT, block()))
    peer.served[-1].answer()
    peer.send(h2.frame(h2.HEADERS, E, RESET, block()), reset(RESET))
    peer.frames()
    return peer


def block(headers: Sequence[Header] = REQUEST) -> bytes:
    """A block that leaves the table as it is."""
    return b"".join(
        b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value for name, value in headers
    )  # fmt: skip


def data(id: int, body: bytes = b"test", flags: int = S) -> bytes:
    return h2.frame(h2.DATA, flags, id, body)


def heads(id: int, body: bytes, flags: int = E | S) -> bytes:
    return h2.frame(h2.HEADERS, flags, id, body)


TRAILERS: Final = block([(b"a", b"b")])
BLOCK: Final = block()
OVERLONG: Final = h2.HEAD.pack(0, h2.FRAME_BYTES_MAX + 1, h2.HEADERS, E, IDLE)
CONNECTION_ERRORS: Final = {
    "4.2 headers larger than a frame may be": (OVERLONG, h2.FRAME_SIZE_ERROR),
    "4.3 headers of another stream within a block": (heads(11, BLOCK, 0) + heads(13, BLOCK), h2.PROTOCOL_ERROR),
    "5.1 data on an idle stream": (data(IDLE), h2.PROTOCOL_ERROR),
    "5.1 a reset of an idle stream": (reset(IDLE), h2.PROTOCOL_ERROR),
    "5.1 a window of an idle stream": (window(IDLE, 1), h2.PROTOCOL_ERROR),
    "5.1 data on a closed stream": (data(ANSWERED), h2.STREAM_CLOSED),
    "5.1 headers on a closed stream": (heads(ANSWERED, TRAILERS), h2.STREAM_CLOSED),
    "5.1 the rest of headers on a closed stream": (h2.frame(h2.CONTINUATION, E, ANSWERED, b""), h2.PROTOCOL_ERROR),
    "5.1 data behind a reset": (data(RESET), h2.STREAM_CLOSED),
    "5.1 headers behind a reset": (heads(RESET, TRAILERS), h2.STREAM_CLOSED),
    "5.1.1 a number below the last": (request(21, BLOCK, b"") + heads(19, BLOCK), h2.STREAM_CLOSED),
    "5.5 an unknown frame within a block": (heads(IDLE, BLOCK, 0) + h2.frame(99, 0, 0, b""), h2.PROTOCOL_ERROR),
    "6.1 data on stream 0": (data(0), h2.PROTOCOL_ERROR),
    "6.1 data that is only the length of its padding": (
        data(OPEN, b"", h2.PADDED), h2.PROTOCOL_ERROR,
    ),
    "6.2 headers on stream 0": (heads(0, BLOCK), h2.PROTOCOL_ERROR),
    "6.3 a stream that is said to depend on itself": (
        h2.frame(h2.PRIORITY, 0, OPEN, h2.U32.pack(OPEN) + b"\0"), h2.PROTOCOL_ERROR,
    ),
    "6.4 a reset of stream 0": (reset(0), h2.PROTOCOL_ERROR),
    "6.5 a confirmation that says more": (h2.frame(h2.SETTINGS, h2.ACK, 0, bytes(6)), h2.FRAME_SIZE_ERROR),
    "6.5.2 frames over the maximum": (h2.settings({h2.FRAME_SIZE: 2**24}), h2.PROTOCOL_ERROR),
    "6.8 a goodbye on a stream": (h2.frame(h2.GOAWAY, 0, OPEN, bytes(8)), h2.PROTOCOL_ERROR),
    "6.9.1 the connection's window over the maximum": (window(0, 2**30) * 2, h2.FLOW_CONTROL_ERROR),
    "6.10 the rest of headers on stream 0": (
        heads(IDLE, BLOCK, 0) + h2.frame(h2.CONTINUATION, E, 0, b""), h2.PROTOCOL_ERROR,
    ),
    "6.10 the rest of headers that are whole": (
        heads(IDLE, BLOCK, E) + h2.frame(h2.CONTINUATION, E, IDLE, b""), h2.PROTOCOL_ERROR,
    ),
    "HPACK 2.3.3 a name by an index that there is not": (heads(IDLE, b"\x7f\x40\x01a"), h2.COMPRESSION_ERROR),
    "HPACK 4.2 a size of the table behind a field": (heads(IDLE, BLOCK + b"\x20"), h2.COMPRESSION_ERROR),
    "HPACK 5.2 padding of a code that is too long": (
        heads(IDLE, BLOCK + b"\0\x01x\x82\x1f\xff"), h2.COMPRESSION_ERROR,
    ),
    "HPACK 5.2 padding of a code with zeros": (heads(IDLE, BLOCK + b"\0\x01x\x81\x18"), h2.COMPRESSION_ERROR),
    "HPACK 5.2 the end of a text within it": (
        heads(IDLE, BLOCK + b"\0\x01x\x84\xff\xff\xff\xff"), h2.COMPRESSION_ERROR,
    ),
    "HPACK 6.1 the index 0": (heads(IDLE, BLOCK + b"\x80"), h2.COMPRESSION_ERROR),
    "HPACK 6.3 a table larger than ours": (heads(IDLE, b"\x3f\xe2\x1f" + BLOCK), h2.COMPRESSION_ERROR),
}  # fmt: skip


@pytest.mark.parametrize(("sent", "code"), CONNECTION_ERRORS.values(), ids=CONNECTION_ERRORS)
def test_connection_errors_end_the_connection(sent: bytes, code: int) -> None:
    peer = standing()
    peer.send(sent)
    assert peer.goodbye() == code
    assert peer.session.over
    assert [each.resets for each in peer.served[:3]] == [1, 0, 1]


LENGTH: Final = (*REQUEST, (b"content-length", b"4"))
STREAM_ERRORS: Final = {
    "5.1 data on a half-closed stream": (data(HALF_CLOSED), HALF_CLOSED, h2.STREAM_CLOSED),
    "5.1 headers on a half-closed stream": (heads(HALF_CLOSED, TRAILERS), HALF_CLOSED, h2.STREAM_CLOSED),
    "6.9 a window that does not grow": (window(OPEN, 0), OPEN, h2.PROTOCOL_ERROR),
    "6.9.1 a window over the maximum": (window(OPEN, 2**31 - 1), OPEN, h2.FLOW_CONTROL_ERROR),
    "8.1 trailers that are not the end": (heads(OPEN, TRAILERS, E), OPEN, h2.PROTOCOL_ERROR),
    "8.1 a method in trailers": (heads(OPEN, block([(b":method", b"POST")])), OPEN, h2.PROTOCOL_ERROR),
    "8.1 a whole request for trailers": (heads(OPEN, BLOCK), OPEN, h2.PROTOCOL_ERROR),
    "8.1.1 less data than its length": (request(IDLE, block(LENGTH), b"abc"), IDLE, h2.PROTOCOL_ERROR),
    "8.1.1 more data than its length": (request(IDLE, block(LENGTH), b"abcde"), IDLE, h2.PROTOCOL_ERROR),
    "8.1.1 more data than its length, in parts": (
        heads(IDLE, block(LENGTH), E) + data(IDLE, b"abc", 0) + data(IDLE, b"de", 0), IDLE, h2.PROTOCOL_ERROR,
    ),
    "8.1.1 trailers before its length": (
        heads(IDLE, block(LENGTH), E) + data(IDLE, b"abc", 0) + heads(IDLE, TRAILERS), IDLE, h2.PROTOCOL_ERROR,
    ),
    "8.1.1 no data, but a length": (heads(IDLE, block(LENGTH)), IDLE, h2.PROTOCOL_ERROR),
    "8.1.1 two lengths": (heads(IDLE, block([*LENGTH, (b"content-length", b"5")])), IDLE, h2.PROTOCOL_ERROR),
    "8.1.1 a length that is no number": (
        heads(IDLE, block([*REQUEST, (b"content-length", b"-1")])), IDLE, h2.PROTOCOL_ERROR,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("sent", "id", "code"), STREAM_ERRORS.values(), ids=STREAM_ERRORS)
def test_stream_errors_reset_only_the_stream(sent: bytes, id: int, code: int) -> None:
    peer = standing()
    peer.send(sent)
    assert peer.frames() == [(h2.RST_STREAM, 0, id, h2.U32.pack(code))]
    assert peer.ask(IDLE + 2).ended


FINE: Final = {
    "4.1 a frame of an unknown type": h2.frame(99, 0xFF, OPEN, b"x"),
    "4.1 flags that there are not": h2.frame(h2.PRIORITY, 0xFF, IDLE, bytes(5)),
    "4.1 the bit that is reserved": h2.frame(h2.PRIORITY, 0, IDLE | 2**31, bytes(5)),
    "5.1 a window of a half-closed stream": window(HALF_CLOSED, 1),
    "5.1 a window of a closed stream": window(ANSWERED, 1),
    "5.1 a reset of a closed stream": reset(ANSWERED),
    "5.1 priorities of all": b"".join(h2.frame(h2.PRIORITY, 0, id, bytes(5)) for id in range(1, 13, 2)),
    "5.1 what was on its way when its stream was cut": data(CUT, b"x", 0) + data(CUT, b"", S),
    "5.1 trailers that were on their way": data(CUT, b"x", 0) + heads(CUT, TRAILERS),
    "5.1 a reset that was on its way": data(CUT, b"x", 0) + reset(CUT),
    "6.4 a reset with a code that nobody knows": reset(OPEN, 0xFF),
    "6.7 the answer to a ping that nobody has sent": h2.frame(h2.PING, h2.ACK, 0, bytes(8)),
    "6.8 a goodbye with a code that nobody knows": h2.goaway(0, 0xFF),
}


@pytest.mark.parametrize("sent", FINE.values(), ids=FINE)
def test_unusual_but_valid_frames_are_ignored(sent: bytes) -> None:
    peer = standing()
    peer.send(sent)
    assert peer.frames() == []
    assert not peer.session.over
    assert peer.ask(IDLE + 2).ended


def test_stream_answered_early_is_closed_once_its_client_has_ended_it() -> None:
    peer = standing()
    peer.send(data(CUT), data(CUT))
    assert peer.goodbye() == h2.STREAM_CLOSED


def test_frames_of_streams_answered_early_long_ago_are_tolerated() -> None:
    peer = Peer()
    last = 2 * streams.CUT_MAX + 1
    for id in range(1, last + 1, 2):
        peer.send(heads(id, BLOCK, E))
        peer.served.pop().answer()
    peer.send(data(1), data(1), data(last))
    assert not peer.session.over
    peer.send(data(last))
    assert peer.session.over


def test_matching_content_length_is_accepted() -> None:
    peer = standing()
    peer.send(request(IDLE, block([*LENGTH, (b"content-length", b"4")]), b"four"))
    peer.send(heads(13, block(LENGTH), E), data(13, b"\x02four--", h2.PADDED), heads(13, TRAILERS))
    assert [(bytes(each.data), each.ended) for each in peer.served[-2:]] == [(b"four", True)] * 2


def test_table_size_updates_apply_each_time() -> None:
    peer = Peer()
    plain, field = block(), Encoder().encode([(b"a", b"b")])
    peer.send(
        *[heads(id, size + plain) for id, size in ((1, b"\x20"), (3, b"\x3f\xe1\x1f"), (5, b"\x20"))],
        heads(7, plain + field),  # a table without room keeps nothing
        heads(9, plain + b"\xbe"),
    )
    assert (len(peer.served), peer.goodbye()) == (4, h2.COMPRESSION_ERROR)


def test_settings_apply_in_order_and_are_acknowledged_once() -> None:
    peer = Peer(start=START)
    peer.send(h2.frame(h2.SETTINGS, 0, 0, b"".join(h2.SETTING.pack(h2.WINDOW, size) for size in (100, 1))))
    peer.send(h2.settings({0xFF: 1}))
    assert peer.frames() == [(h2.SETTINGS, h2.ACK, 0, b"")] * 2
    peer.ask().answer(b"ab")
    assert peer.answered(1) == b"a"
