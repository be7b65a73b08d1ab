"""Cutting a stream at event boundaries: any split hands on the same bytes, and only whole events."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from forebay.wire.sse import HELD_BYTES_MAX, EventCutter, last_data

LF = (b"data: 1\n\n", b"event: x\ndata: two\ndata: lines\n\n", b": comment\n\n")
streams = st.lists(st.sampled_from(LF), max_size=8) | st.lists(st.just(b"data: crlf\r\n\r\n"), max_size=8)


@given(streams, st.lists(st.integers(0, 200), max_size=8))
def test_every_split_hands_on_the_same_whole_events(events: list[bytes], cuts: list[int]) -> None:
    data = b"".join(events)
    marks = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    cutter = EventCutter()
    out = b""
    for start, end in pairwise(marks):
        piece = cutter.feed(data[start:end])
        assert piece == b"" or piece.endswith((b"\n\n", b"\r\n\r\n"))
        out += piece
    assert (out, cutter.held, cutter.events) == (data, b"", len(events))


def test_an_unfinished_event_is_held() -> None:
    cutter = EventCutter()
    assert cutter.feed(b"data: 1\n\ndata: 2\n") == b"data: 1\n\n"
    assert cutter.held == b"data: 2\n"
    assert cutter.feed(b"\ndata") == b"data: 2\n\n"
    assert (cutter.held, cutter.events, cutter.open) == (b"data", 2, False)


def test_an_endless_event_is_passed_on_in_pieces() -> None:
    cutter = EventCutter()
    large = b"data: " + b"x" * HELD_BYTES_MAX
    assert cutter.feed(large) == large
    assert cutter.open
    assert cutter.feed(b"\n\n") == b"\n\n"
    assert not cutter.open


def test_the_last_data_of_whole_events_is_found() -> None:
    assert last_data(b'data: 1\n\ndata: {"error":1}\n\n') == b'{"error":1}'
    assert last_data(b"data:x\r\n\r\n") == b"x"
    assert last_data(b"") == b""
