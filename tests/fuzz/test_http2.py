"""HTTP/2: whatever the bytes and however they are cut, a clean end, and one reading of a request."""

from itertools import product

from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.corpus import cuts, mutated, pieces
from tests.wire.http2.peer import REQUEST, START, Peer, request, reset, window

from forebay.wire.http2 import frames as h2

_encoder = Encoder()
TALKS = (
    START
    + b"".join(request(id, _encoder.encode(REQUEST), b"question %d" % id) for id in (1, 3, 5))
    + window(0, 7)
    + window(3, 9)
    + reset(5)
    + h2.frame(h2.PING, 0, 0, b"12345678"),
    START
    + h2.settings({h2.WINDOW: 3, h2.FRAME_SIZE: 20_000})
    + h2.frame(h2.HEADERS, 0, 1, _encoder.encode(REQUEST)[:4])
    + h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1, b"\x84")
    + h2.frame(h2.DATA, h2.PADDED, 1, b"\1xyz\0")
    + h2.frame(h2.PRIORITY, 0, 1, bytes(5))
    + h2.frame(h2.DATA, h2.END_STREAM, 1, b""),
)
WORDS = (
    *(h2.frame(*head, bytes(size)) for *head, size in product(range(11), (0, 1, 5, 44), (0, 1), (0, 4))),
    window(1, 2**31 - 1),
    h2.settings({h2.WINDOW: 2**31 - 1}),
    h2.settings({h2.WINDOW: 0}),
    b"\x3f\xe1\x1f",
    b"\xff\xff\xff\xff\xff",
)  # fmt: skip
talks = mutated(TALKS, WORDS) | st.binary(max_size=200).map(lambda data: START + data)


def held(parts: list[bytes], answering: bool) -> Peer:
    """A talk of that client; requests are answered, or never."""
    peer = Peer(start=b"")
    for part in parts:
        peer.send(part)
        for each in peer.served if answering else ():
            if each.ended and each.stream.handler is not None and not each.stream.queue:
                each.answer(b"answer" * 9)
    return peer


@given(talks, cuts, st.booleans())
def test_any_bytes_end_in_whole_frames_and_at_most_one_goodbye(data: bytes, at: list[int], answering: bool) -> None:
    peer = held(pieces(data, at), answering)
    goodbyes = [frame for frame in peer.frames() if frame[0] == h2.GOAWAY]
    assert len(goodbyes) == peer.session.over
    assert all(each.resets <= 1 for each in peer.served)
    open_ones = {each.stream.id for each in peer.served if each.stream.handler is not None}
    assert set(peer.session.streams) == open_ones
    peer.session.lost()
    assert not peer.session.streams


@given(talks, cuts)
def test_any_bytes_are_the_same_requests_for_every_split(data: bytes, at: list[int]) -> None:
    whole, cut = held([data], False), held(pieces(data, at), False)
    assert [(each.headers, each.data, each.ended, each.resets) for each in cut.served] == [
        (each.headers, each.data, each.ended, each.resets) for each in whole.served
    ]
    assert cut.frames() == whole.frames()
