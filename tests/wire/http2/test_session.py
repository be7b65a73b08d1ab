"""An HTTP/2 session: requests and responses, flow control, and everything that ends a stream or the connection."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.http2.peer import REQUEST, START, Peer, request, reset, window

from forebay.wire.http2 import frames as h2
from forebay.wire.http2 import headers, noise
from forebay.wire.http2 import session as module

E, S = h2.END_HEADERS, h2.END_STREAM


def test_request_is_received_and_answered() -> None:
    peer = Peer()
    served = peer.ask(1, b"question")
    assert (bytes(served.data), served.ended, served.headers) == (b"question", True, list(REQUEST))
    served.answer(b"answer")
    assert [(kind, flags, id, body) for kind, flags, id, body in peer.frames()] == [
        (h2.HEADERS, E, 1, b"\x88"), (h2.DATA, 0, 1, b"answer"), (h2.HEADERS, E | S, 1, b"\x8c"),
    ]  # fmt: skip
    assert not peer.session.streams


def test_bytes_may_be_split_anywhere() -> None:
    peer = Peer(start=b"")
    for byte in START + request(1, peer.encoder.encode(REQUEST), b"question"):
        peer.send(bytes((byte,)))
    assert bytes(peer.served[0].data) == b"question"


@given(st.lists(st.integers(1, 200_000), max_size=12), st.integers(0, 16_384))
def test_much_at_once_may_begin_and_end_within_frames(cuts: list[int], last: int) -> None:
    peer = Peer()
    question = random.Random(last).randbytes(160_000 + last)
    data = request(1, peer.encoder.encode(REQUEST), question) + h2.frame(h2.PING, 0, 0, b"12345678")
    ends = sorted({0, len(data), *(each % len(data) for each in cuts)})
    for first, end in pairwise(ends):
        peer.send(data[first:end])
    assert (bytes(peer.served[0].data), peer.served[0].ended) == (question, True)
    assert peer.frames()[-1] == (h2.PING, h2.ACK, 0, b"12345678")


def test_what_is_wrong_in_much_at_once_ends_the_connection() -> None:
    for at in (0, 5, 9, 5000):
        peer = Peer()
        data = h2.frame(h2.DATA, 0, 1, bytes(h2.FRAME_BYTES_MAX + 1)) + bytes(50_000)
        peer.send(data[:at])
        peer.send(data[at:])
        assert peer.session.over
        assert b"16385 bytes; 16384 are allowed" in peer.frames()[-1][3]


def test_padding_and_priority_are_ignored() -> None:
    peer = Peer()
    block = peer.encoder.encode(REQUEST)
    body = b"\3" + b"\0\0\0\0\7" + block + b"\0\0\0"
    peer.send(
        h2.frame(h2.HEADERS, E | h2.PADDED | h2.PRIORITISED, 1, body),
        h2.frame(h2.PRIORITY, 0, 1, bytes(5)),
        h2.frame(77, 0, 1, b"unknown"),
        h2.frame(h2.DATA, S | h2.PADDED, 1, b"\2hi\0\0"),
    )
    assert (bytes(peer.served[0].data), peer.served[0].ended) == (b"hi", True)


def test_headers_may_be_continued_and_end_with_trailers() -> None:
    peer = Peer()
    block = peer.encoder.encode(REQUEST)
    peer.send(
        h2.frame(h2.HEADERS, 0, 1, block[:3]),
        h2.frame(h2.CONTINUATION, 0, 1, block[3:5]),
        h2.frame(h2.CONTINUATION, E, 1, block[5:]),
        h2.frame(h2.DATA, 0, 1, b"x"),
        h2.frame(h2.HEADERS, E | S, 1, peer.encoder.encode([(b"checksum", b"1")])),
    )
    assert (bytes(peer.served[0].data), peer.served[0].ended) == (b"x", True)


def test_response_is_sent_as_the_stream_window_allows() -> None:
    peer = Peer(start=h2.PREFACE + h2.settings({h2.WINDOW: 10}))
    peer.ask().answer(bytes(range(25)))
    assert peer.answered(1) == bytes(range(10))
    peer.send(window(1, 5))
    assert peer.answered(1) == bytes(range(10, 15))
    peer.send(h2.settings({h2.WINDOW: 0}))  # the stream owes ten bytes now
    peer.send(window(1, 10))
    assert peer.answered(1) == b""
    peer.send(h2.settings({h2.WINDOW: 100}))
    kinds = [(kind, body) for kind, _, id, body in peer.frames() if id == 1]
    assert kinds == [(h2.DATA, bytes(range(15, 25))), (h2.HEADERS, b"\x8c")]


def test_larger_window_is_acknowledged_before_it_is_used() -> None:
    peer = Peer(start=h2.PREFACE + h2.settings({h2.WINDOW: 0}))
    peer.ask(1).answer(b"a" * 10)
    peer.ask(3).answer(b"b" * 10)
    peer.frames()
    peer.send(h2.settings({h2.WINDOW: 10}))  # gRPC's clients end streams whose data comes before the acknowledgement
    kinds = [(kind, flags & h2.ACK) for kind, flags, _, _ in peer.frames() if kind in (h2.SETTINGS, h2.DATA)]
    assert kinds == [(h2.SETTINGS, h2.ACK), (h2.DATA, 0), (h2.DATA, 0)]


def test_responses_share_the_connection_window() -> None:
    peer = Peer()
    served = [peer.ask(id) for id in (1, 3, 5)]
    for each in served:
        each.answer(bytes(40_000))
    frames = peer.frames()
    assert sum(len(body) for kind, _, _, body in frames if kind == h2.DATA) == h2.WINDOW_START
    assert {id for kind, _, id, _ in frames if kind == h2.DATA} == {1, 3}
    peer.send(window(0, 100_000))
    assert sum(len(body) for kind, _, _, body in peer.frames() if kind == h2.DATA) == 120_000 - h2.WINDOW_START
    assert not peer.session.streams


def test_nothing_is_sent_while_the_transport_is_full() -> None:
    peer = Peer()
    peer.session.paused = True
    peer.ask().answer(b"answer")
    assert peer.answered(1) == b""
    peer.session.resume()
    assert peer.answered(1) == b"answer"


def test_early_response_resets_the_request() -> None:
    peer = Peer()
    peer.send(h2.frame(h2.HEADERS, E, 1, peer.encoder.encode(REQUEST)))
    peer.served[0].answer()
    assert peer.frames()[-1] == (h2.RST_STREAM, 0, 1, bytes(4))
    peer.send(h2.frame(h2.DATA, S, 1, b"late"))  # it may have been on its way
    assert peer.goodbye() is None


def test_window_is_updated_only_for_consumed_bytes() -> None:
    peer = Peer()
    peer.send(h2.frame(h2.HEADERS, E, 1, peer.encoder.encode(REQUEST)))
    stream = peer.served[0].stream
    part = h2.frame(h2.DATA, 0, 1, bytes(h2.FRAME_BYTES_MAX))
    for _ in range(module.STREAM_WINDOW // h2.FRAME_BYTES_MAX // 2):
        peer.send(part)
    assert [kind for kind, _, _, _ in peer.frames()] == [h2.WINDOW_UPDATE]
    stream.held = True
    for _ in range(module.STREAM_WINDOW // h2.FRAME_BYTES_MAX):
        peer.send(part)
    assert peer.frames() == []
    peer.session.release(stream)
    assert [(kind, id) for kind, _, id, _ in peer.frames()] == [(h2.WINDOW_UPDATE, 1)]
    for _ in range(4 * module.CONNECTION_WINDOW // h2.FRAME_BYTES_MAX):
        peer.send(part)
    assert not peer.session.over
    assert {id for _, _, id, _ in peer.frames()} == {0, 1}


def test_exceeding_the_stream_window_resets_the_stream() -> None:
    peer = Peer()
    peer.send(h2.frame(h2.HEADERS, E, 1, peer.encoder.encode(REQUEST)))
    peer.served[0].stream.held = True
    for _ in range(module.STREAM_WINDOW // h2.FRAME_BYTES_MAX + 1):
        peer.send(h2.frame(h2.DATA, 0, 1, bytes(h2.FRAME_BYTES_MAX)))
    assert peer.frames() == [(h2.RST_STREAM, 0, 1, h2.U32.pack(h2.FLOW_CONTROL_ERROR))]
    assert peer.served[0].resets == 1


def test_cancelled_request_is_reported_once() -> None:
    peer = Peer()
    served = peer.ask()
    peer.send(reset(1), reset(1))
    assert served.resets == 1
    assert peer.goodbye() is None
    other = peer.ask(3)
    peer.session.lost()
    assert (other.resets, peer.session.over) == (1, True)
    peer.send(b"anything")
    assert peer.frames() == []


def test_pings_and_settings_are_acknowledged() -> None:
    peer = Peer(start=b"")
    peer.send(START, h2.frame(h2.PING, 0, 0, b"12345678"), h2.frame(h2.PING, h2.ACK, 0, bytes(8)))
    found = peer.frames()
    assert [(kind, flags) for kind, flags, _, _ in found] == [
        (h2.SETTINGS, 0), (h2.WINDOW_UPDATE, 0), (h2.SETTINGS, h2.ACK), (h2.PING, h2.ACK),
    ]  # fmt: skip
    assert found[-1][3] == b"12345678"
    peer.session.on_ping = lambda: False
    peer.send(h2.frame(h2.PING, 0, 0, bytes(8)))
    assert peer.goodbye() == h2.CALM_DOWN


def test_graceful_shutdown_accepts_requests_in_transit() -> None:
    peer = Peer()
    first = peer.ask(1)
    peer.session.leave()
    second = peer.ask(3)
    (ping,) = [body for kind, _, _, body in peer.frames() if kind == h2.PING]
    peer.send(h2.frame(h2.PING, h2.ACK, 0, ping))
    assert peer.frames()[-1] == (h2.GOAWAY, 0, 0, h2.U32.pack(3) + bytes(4))
    peer.send(request(5, peer.encoder.encode(REQUEST), b""))
    assert len(peer.served) == 2
    first.answer()
    assert not peer.session.over
    second.answer()
    assert peer.session.over


def test_idle_connection_shuts_down_immediately() -> None:
    peer = Peer()
    peer.session.refuse()
    peer.session.refuse()
    assert (peer.goodbye(), peer.session.over) == (h2.NO_ERROR, True)


HEAD_1 = h2.frame(h2.HEADERS, E, 1, Peer(start=b"").encoder.encode(REQUEST))
BROKEN = {
    "another protocol": (b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", h2.PROTOCOL_ERROR),
    "a frame that is too long": (START + h2.frame(h2.DATA, 0, 1, bytes(20_000)), h2.FRAME_SIZE_ERROR),
    "data for nobody": (START + h2.frame(h2.DATA, 0, 1, b"x"), h2.PROTOCOL_ERROR),
    "an even stream": (START + h2.frame(h2.HEADERS, E, 2, b"\x82"), h2.PROTOCOL_ERROR),
    "a block that says nothing": (START + h2.frame(h2.HEADERS, E, 1, b"\xff" * 6), h2.COMPRESSION_ERROR),
    "an index into nothing": (START + h2.frame(h2.HEADERS, E, 1, b"\xbf"), h2.COMPRESSION_ERROR),
    "all padding": (START + HEAD_1 + h2.frame(h2.DATA, h2.PADDED, 1, b"\x09abc"), h2.PROTOCOL_ERROR),
    "headers that are all padding": (START + h2.frame(h2.HEADERS, E | h2.PADDED, 1, b"\x09a"), h2.PROTOCOL_ERROR),
    "a stream that depends on itself": (
        START + h2.frame(h2.HEADERS, E | h2.PRIORITISED, 1, b"\0\0\0\1\0"), h2.PROTOCOL_ERROR,
    ),
    "a block that was interrupted": (
        START + h2.frame(h2.HEADERS, 0, 1, b"") + h2.frame(h2.PING, 0, 0, bytes(8)), h2.PROTOCOL_ERROR,
    ),
    "the rest of nothing": (START + h2.frame(h2.CONTINUATION, E, 1, b""), h2.PROTOCOL_ERROR),
    "the rest of another block": (
        START + h2.frame(h2.HEADERS, 0, 1, b"") + h2.frame(h2.CONTINUATION, E, 3, b""), h2.PROTOCOL_ERROR,
    ),
    "a push": (START + h2.frame(h2.PUSH_PROMISE, 0, 1, b""), h2.PROTOCOL_ERROR),
    "a short ping": (START + h2.frame(h2.PING, 0, 0, b"1"), h2.FRAME_SIZE_ERROR),
    "a ping for a stream": (START + h2.frame(h2.PING, 0, 1, bytes(8)), h2.PROTOCOL_ERROR),
    "half a setting": (START + h2.frame(h2.SETTINGS, 0, 0, b"123"), h2.FRAME_SIZE_ERROR),
    "settings of a stream": (START + h2.frame(h2.SETTINGS, 0, 1, b""), h2.PROTOCOL_ERROR),
    "a window over the maximum": (START + h2.settings({h2.WINDOW: 2**31}), h2.FLOW_CONTROL_ERROR),
    "frames under the minimum": (START + h2.settings({h2.FRAME_SIZE: 1}), h2.PROTOCOL_ERROR),
    "a strange push": (START + h2.settings({h2.ENABLE_PUSH: 2}), h2.PROTOCOL_ERROR),
    "a window that overflows": (START + window(0, 2**31 - 1), h2.FLOW_CONTROL_ERROR),
    "a window that does not grow": (START + window(0, 0), h2.PROTOCOL_ERROR),
    "a short window": (START + h2.frame(h2.WINDOW_UPDATE, 0, 0, b"1"), h2.FRAME_SIZE_ERROR),
    "a window of nobody": (START + window(9, 1), h2.PROTOCOL_ERROR),
    "a reset of nobody": (START + reset(9), h2.PROTOCOL_ERROR),
    "a short reset": (START + h2.frame(h2.RST_STREAM, 0, 1, b"1"), h2.FRAME_SIZE_ERROR),
    "a priority of nobody": (START + h2.frame(h2.PRIORITY, 0, 0, bytes(5)), h2.PROTOCOL_ERROR),
    "a short priority": (START + h2.frame(h2.PRIORITY, 0, 1, b"1"), h2.FRAME_SIZE_ERROR),
    "a short goodbye": (START + h2.frame(h2.GOAWAY, 0, 0, b"1"), h2.FRAME_SIZE_ERROR),
    "more data than the connection takes": (
        START + HEAD_1 + h2.frame(h2.DATA, S, 1, b"") + h2.frame(h2.DATA, 0, 1, bytes(16_384)) * 3000, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("data", "code"), BROKEN.values(), ids=BROKEN)
def test_protocol_error_has_a_reason(data: bytes, code: int | None) -> None:
    peer = Peer(start=b"")
    peer.send(data)
    assert peer.goodbye() == code
    assert peer.session.over == (code is not None)


STREAM_ERRORS = {
    "no path": (REQUEST[:2], h2.PROTOCOL_ERROR),
    "a name in capitals": ((*REQUEST, (b"Name", b"x")), h2.PROTOCOL_ERROR),
    "a connection header": ((*REQUEST, (b"connection", b"x")), h2.PROTOCOL_ERROR),
    "a method twice": ((REQUEST[0], *REQUEST), h2.PROTOCOL_ERROR),
    "a pseudo header behind": ((*REQUEST, (b":path", b"x")), h2.PROTOCOL_ERROR),
    "a pseudo header that there is not": (((b":status", b"1"), *REQUEST), h2.PROTOCOL_ERROR),
    "a line break": ((*REQUEST, (b"a", b"x\r\ny")), h2.PROTOCOL_ERROR),
    "no name": ((*REQUEST, (b"", b"x")), h2.PROTOCOL_ERROR),
    "an empty path": ((*REQUEST[:2], (b":path", b""), *REQUEST[3:]), h2.PROTOCOL_ERROR),
    "another te": ((*REQUEST[:-1], (b"te", b"gzip")), h2.PROTOCOL_ERROR),
}


@pytest.mark.parametrize(("headers", "code"), STREAM_ERRORS.values(), ids=STREAM_ERRORS)
def test_malformed_request_resets_only_its_stream(headers: tuple[tuple[bytes, bytes], ...], code: int) -> None:
    peer = Peer()
    peer.send(h2.frame(h2.HEADERS, E | S, 1, peer.encoder.encode(headers)))
    assert peer.frames() == [(h2.RST_STREAM, 0, 1, h2.U32.pack(code))]
    assert peer.ask(3).ended


def test_misplaced_trailers_reset_the_stream() -> None:
    peer = Peer()
    head, trailers = peer.encoder.encode(REQUEST), peer.encoder.encode([(b"a", b"b")])
    peer.send(h2.frame(h2.HEADERS, E, 1, head), h2.frame(h2.HEADERS, E, 1, trailers))
    trailers = peer.encoder.encode([(b"a", b"b")])
    peer.ask(3)
    peer.send(h2.frame(h2.HEADERS, E | S, 3, trailers), h2.frame(h2.HEADERS, E | S, 3, trailers))
    assert [h2.U32.unpack(body)[0] for _, _, _, body in peer.frames()] == [h2.PROTOCOL_ERROR, h2.STREAM_CLOSED]
    assert [each.resets for each in peer.served] == [1, 1]


def test_window_overflow_is_an_error() -> None:
    peer = Peer()
    for id, more in ((1, 0), (3, 2**31 - 1)):
        peer.ask(id)
        peer.send(window(id, more))
    codes = [h2.U32.unpack(body)[0] for _, _, _, body in peer.frames()]
    assert codes == [h2.PROTOCOL_ERROR, h2.FLOW_CONTROL_ERROR]
    peer.ask(5)
    peer.send(window(5, 2**31 - 1 - h2.WINDOW_START), h2.settings({h2.WINDOW: h2.WINDOW_START + 1}))
    assert peer.goodbye() == h2.FLOW_CONTROL_ERROR


@pytest.mark.interpreted
def test_number_of_streams_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STREAMS_MAX", 2)
    peer = Peer()
    for id in (1, 3, 5):
        peer.ask(id)
    assert peer.frames() == [(h2.RST_STREAM, 0, 5, h2.U32.pack(h2.REFUSED_STREAM))]
    peer.served[0].answer()
    assert peer.ask(7).ended


FLOODS = {
    "pings": lambda i: h2.frame(h2.PING, 0, 0, bytes(8)),
    "settings": lambda i: h2.settings({h2.WINDOW: i % 2}),
    "empty data": lambda i: h2.frame(h2.DATA, 0, 1, b""),
    "tiny windows": lambda i: window(0, 1),
    "priorities": lambda i: h2.frame(h2.PRIORITY, 0, 1, bytes(5)),
    "unknown frames": lambda i: h2.frame(99, 0, 1, b""),
    "trailers of nothing": lambda i: h2.frame(h2.HEADERS, E, 1, b"\x82"),
}


@pytest.mark.parametrize("kind", FLOODS)
def test_floods_of_frames_that_carry_nothing_end_the_connection(kind: str) -> None:
    peer = Peer()
    peer.send(HEAD_1)
    if kind == "trailers of nothing":
        peer.served[0].answer()
    for number in range(2 * noise.NOISE_MAX):
        peer.send(FLOODS[kind](number))
        if peer.session.over:
            break
        if number % 1000 == 0:
            peer.frames()
    assert peer.goodbye() == h2.CALM_DOWN
    assert number <= noise.NOISE_MAX


def test_tiny_window_updates_end_the_connection() -> None:
    peer = Peer(start=h2.PREFACE + h2.settings({h2.WINDOW: 0}))
    peer.ask().answer(bytes(60_000))
    peer.send(*[window(1, 1)] * (noise.NOISE_MAX - 1))
    assert not peer.session.over
    peer.send(window(1, 1))
    assert peer.goodbye() == h2.CALM_DOWN


def test_repeated_window_settings_in_one_frame_end_the_connection() -> None:
    peer = Peer()
    for id in range(1, 6400, 2):
        peer.ask(id)
    peer.send(h2.frame(h2.SETTINGS, 0, 0, b"".join(h2.SETTING.pack(h2.WINDOW, n % 2) for n in range(2000))))
    assert peer.goodbye() == h2.CALM_DOWN


def test_rapid_resets_end_the_connection_long_before_other_noise() -> None:
    peer = Peer()
    block = peer.encoder.encode(REQUEST)
    for number in range(noise.NOISE_MAX):
        peer.send(request(2 * number + 1, block, b"x"), reset(2 * number + 1))
        if peer.session.over:
            break
    assert number < noise.NOISE_MAX / noise.RESET_NOISE
    assert all(each.resets == 1 for each in peer.served)


def test_resets_provoked_by_a_client_count_as_noise() -> None:
    peer = Peer()
    block = peer.encoder.encode(REQUEST)
    for number in range(noise.NOISE_MAX):
        peer.send(request(2 * number + 1, block, b"x"), window(2 * number + 1, 0))
        if peer.session.over:
            break
    assert number < noise.NOISE_MAX / noise.RESET_NOISE


def test_responses_and_time_reduce_the_noise_count() -> None:
    peer = Peer()
    block = peer.encoder.encode(REQUEST)
    for number in range(noise.NOISE_MAX // 4):
        peer.send(
            request(2 * number + 1, block, b"x"),
            *[h2.frame(h2.PRIORITY, 0, 1, bytes(5))] * 4,
            h2.frame(h2.PING, 0, 0, bytes(8)),
            window(0, 10),
        )
        peer.served.pop().answer()
    assert not peer.session.over
    for _ in range(4):
        for _ in range(noise.NOISE_PER_TICK):
            peer.send(h2.frame(h2.PING, 0, 0, bytes(8)))
        peer.session.tick()
    assert not peer.session.over


def test_header_block_is_limited_in_bytes_and_frames() -> None:
    for part, count in ((bytes(16_000), 3), (b"", headers.CONTINUATIONS_MAX + 1)):
        peer = Peer()
        peer.send(h2.frame(h2.HEADERS, 0, 1, b""))
        for _ in range(count):
            assert not peer.session.over
            peer.send(h2.frame(h2.CONTINUATION, 0, 1, part))
        assert peer.goodbye() == h2.CALM_DOWN


def test_header_compression_bomb_ends_the_connection() -> None:
    peer = Peer()
    bomb = b"\x40\x01a\x7f\xa1\x1e" + bytes(4000) + b"\xbe" * 10_000
    peer.send(h2.frame(h2.HEADERS, E, 1, bomb))
    assert peer.goodbye() == h2.COMPRESSION_ERROR
