"""gRPC framing: messages, deadlines, encodings, status trailers."""

import gzip
import urllib.parse
import zlib
from itertools import pairwise

import pytest
from hpack import Decoder
from hypothesis import given
from hypothesis import strategies as st

from forebay.wire.http2 import grpc
from forebay.wire.http2.grpc import (
    PREFIX_BYTES,
    BadMessage,
    Messages,
    Place,
    answer_head,
    answer_tail,
    escaped,
    framed,
    packed,
    timeout_s,
    unpacked,
)


def fed(
    data: bytes, at: list[int], coding: bytes = b"", most: int = 1000, place: Place | None = None
) -> tuple[list[bytes], bool]:
    """The messages of data that is split there, and whether one is not whole."""
    messages, found = Messages(most, place), list[bytes]()
    cuts = sorted({0, len(data), *(each % (len(data) + 1) for each in at)})
    for first, last in pairwise(cuts):
        messages.feed(
            memoryview(data)[first:last],
            lambda message, is_packed: found.append(unpacked(message, coding, most) if is_packed else bytes(message)),
        )
        done = sum(PREFIX_BYTES + len(each) for each in found)
        if not coding:  # the prefix of a message that is put elsewhere is not kept
            assert last - done - messages.size in ({0} if place is None else {0, PREFIX_BYTES})
    return found, messages.waiting


@given(
    st.lists(st.binary(max_size=40), max_size=5),
    st.lists(st.integers(0, 400)),
    st.sampled_from([b"", b"gzip", b"deflate"]),
)
def test_messages_round_trip(sent: list[bytes], at: list[int], coding: bytes) -> None:
    data = b"".join(
        packed(each, coding) if coding and number % 2 else framed(each) for number, each in enumerate(sent)
    )
    assert fed(data, at, coding) == (sent, False)
    if data:
        assert fed(data[:-1], at, coding) == (sent[:-1], True)


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=5),
    st.lists(st.integers(0, 400)),
    st.integers(0, 40),
    st.sampled_from([b"", b"gzip"]),
)
def test_messages_of_some_sizes_are_put_elsewhere(sent: list[bytes], at: list[int], size: int, coding: bytes) -> None:
    placed: list[tuple[int, bytes]] = []

    def place(length: int, head: bytes) -> memoryview | None:
        placed.append((length, head))
        return memoryview(bytearray(length)) if length >= size else None

    data = b"".join(
        packed(each, coding) if coding and number % 2 else framed(each) for number, each in enumerate(sent)
    )
    assert fed(data, at, coding, place=place) == (sent, False)
    begun = iter(sent[:: 2 if coding else 1])
    for length, head in placed:  # once for each that comes in parts, and for no compressed one
        assert any(len(each) == length and each.startswith(head) for each in begun)
    if data:
        assert fed(data[:-1], at, coding, place=place) == (sent[:-1], True)


def test_compressed_messages_round_trip() -> None:
    assert gzip.decompress(packed(b"x" * 99, b"gzip")[5:]) == b"x" * 99
    assert zlib.decompress(packed(b"x" * 99, b"deflate")[5:]) == b"x" * 99


@pytest.mark.parametrize(
    ("data", "coding", "code", "text"),
    [
        (framed(bytes(1001))[:5], b"", grpc.RESOURCE_EXHAUSTED, "Received message larger than max (1001 vs. 1000)"),
        (packed(bytes(1001), b"gzip"), b"gzip", grpc.RESOURCE_EXHAUSTED, "Received unpacked message larger than max"),
        (packed(b"x", b"gzip"), b"", grpc.INTERNAL, "a message is packed, but grpc-encoding does not say how"),
        (packed(b"x", b"deflate"), b"gzip", grpc.INTERNAL, "a message is not gzip"),
        (
            b"\1\0\0\0\x0a" + gzip.compress(b"x" * 50, mtime=0)[:10],
            b"gzip",
            grpc.INTERNAL,
            "a message is not whole gzip",
        ),
    ],
)
def test_invalid_message_has_a_reason(data: bytes, coding: bytes, code: int, text: str) -> None:
    with pytest.raises(BadMessage, match=text[:30].replace("(", r"\(")) as error:
        fed(data, [], coding)
    assert (error.value.code, str(error.value)[: len(text)]) == (code, text)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(b"1H", 3600.0), (b"2M", 120.0), (b"3S", 3.0), (b"4m", 0.004), (b"5u", 5e-6), (b"99999999n", 0.099999999)],
)
def test_deadlines_have_units(value: bytes, seconds: float) -> None:
    assert timeout_s(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", [b"", b"1", b"S", b"1s", b"-1S", b"1.5S", b"123456789S", b"\xb2S"])
def test_invalid_deadline_is_rejected(value: bytes) -> None:
    with pytest.raises(ValueError, match="expected"):
        timeout_s(value)


@given(st.text(max_size=50))
def test_error_messages_round_trip_percent_encoded(text: str) -> None:
    sent = escaped(text)
    assert sent.isascii()
    assert sent.decode().isprintable()
    assert urllib.parse.unquote(sent.decode()) == text


def test_long_error_messages_are_truncated_between_characters() -> None:
    assert len(escaped("x" * 1_000_000)) == grpc.TEXT_BYTES_MAX
    assert urllib.parse.unquote(escaped("é" * 1_000_000).decode()) == "é" * (grpc.TEXT_BYTES_MAX // 6)


def test_response_headers_and_trailers_of_a_call() -> None:
    assert dict(Decoder().decode(answer_head(b"gzip"))) == {
        ":status": "200",
        "content-type": "application/grpc",
        "grpc-accept-encoding": "identity, deflate, gzip",
        "grpc-encoding": "gzip",
    }
    assert dict(Decoder().decode(answer_tail(grpc.OK))) == {"grpc-status": "0"}
    alone = dict(Decoder().decode(answer_tail(grpc.NOT_FOUND, "no", alone=True)))
    assert (alone[":status"], alone["grpc-status"], alone["grpc-message"]) == ("200", "5", "no")
    assert dict(Decoder().decode(answer_tail(grpc.UNAVAILABLE, retry_after_s=3))) == {
        "grpc-status": "14",
        "grpc-retry-pushback-ms": "3000",
    }
