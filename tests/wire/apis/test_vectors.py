"""Vectors read from embeddings responses: lists or base64, a bounded number, none from other responses."""

import base64
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.wire.apis.vectors import VECTORS_MAX, embedded

FLOATS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=8)


def answer(*embeddings: object) -> bytes:
    data = [{"object": "embedding", "index": at, "embedding": each} for at, each in enumerate(embeddings)]
    return msgspec.json.encode({"object": "list", "data": data, "model": "m", "usage": {"prompt_tokens": 1}})


def encoded(floats: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(floats)}f", *floats)).decode()


@given(st.lists(FLOATS, max_size=VECTORS_MAX))
def test_lists_and_base64_give_the_same_vectors(vectors: list[list[float]]) -> None:
    assert embedded(answer(*vectors)) == vectors
    assert [list(each) for each in embedded(answer(*map(encoded, vectors)))] == vectors


def test_only_the_first_of_many_vectors_are_read() -> None:
    assert embedded(answer(*([float(n)] for n in range(100)))) == [[float(n)] for n in range(VECTORS_MAX)]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"data":null}',
        b'{"data":[{"embedding":null}]}',
        b'{"data":[{"embedding":["1"]}]}',
        answer("AAA"),  # no base64
        answer("AAAA"),  # three bytes are no float
        answer([1.0], "é"),
    ],
)
def test_other_responses_have_no_vectors(body: bytes) -> None:
    assert embedded(body) == []
