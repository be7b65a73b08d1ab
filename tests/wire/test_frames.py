"""Length-prefixed frames: they round-trip however bytes are split, within the size limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.wire.frames import FrameReader, FrameTooLarge, frame


@given(st.lists(st.binary(max_size=300), max_size=12), st.lists(st.integers(1, 97), min_size=1, max_size=20))
def test_any_split_of_the_bytes_gives_the_same_payloads(payloads: list[bytes], sizes: list[int]) -> None:
    stream = b"".join(frame(payload) for payload in payloads)
    reader, got, at, turn = FrameReader(), [], 0, 0
    while at < len(stream):
        size = sizes[turn % len(sizes)]
        got += reader.feed(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert got == payloads


@given(
    st.lists(st.tuples(st.binary(max_size=20), st.sampled_from(["alone", "halved", "with the next"])), max_size=12)
)
def test_frame_in_a_single_read_is_parsed_like_others(frames: list[tuple[bytes, str]]) -> None:
    reader, got, rest = FrameReader(), [], b""
    for payload, comes in frames:
        data, rest = rest + frame(payload), b""
        if comes == "with the next":
            rest = data
            continue
        middle = len(data) // 2 if comes == "halved" else 0
        got += reader.feed(data[:middle])
        got += reader.feed(data[middle:])
    assert got + reader.feed(rest) == [payload for payload, _ in frames]


def test_payload_size_limit_is_exact() -> None:
    reader = FrameReader(bytes_max=10)
    assert reader.feed(frame(b"x" * 10)) == [b"x" * 10]
    with pytest.raises(FrameTooLarge, match="11 bytes is over the limit of 10"):
        reader.feed((11).to_bytes(4, "big"))
    with pytest.raises(FrameTooLarge):
        frame(b"x" * 11, bytes_max=10)
