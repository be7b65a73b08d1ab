"""Extracts the vectors from a whole body of `/v1/embeddings`, as lists or base64.

Not on the request path: used for the few requests that are compared during a rollout.
"""

import base64
import struct
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from forebay.wire.documents import UNREADABLE

VECTORS_MAX: Final = 8
"""Of a request with many inputs, only the first ones are compared: they are enough to show a difference between
revisions."""
FLOAT_BYTES: Final = 4
Vectors: TypeAlias = list[Sequence[float]]


class _Vector(msgspec.Struct):
    embedding: list[float] | str


class _Answer(msgspec.Struct):
    data: list[_Vector]


_answer = msgspec.json.Decoder(_Answer).decode


def embedded(body: bytes) -> Vectors:
    """The first vectors, up to `VECTORS_MAX`; none if the body is not a response with vectors."""
    try:
        return [_floats(each.embedding) for each in _answer(body).data[:VECTORS_MAX]]
    except (*UNREADABLE, ValueError, struct.error):
        return []


def _floats(found: list[float] | str) -> Sequence[float]:
    if isinstance(found, list):
        return found
    data = base64.b64decode(found, validate=True)
    return struct.unpack(f"<{len(data) // FLOAT_BYTES}f", data)
