"""gzip and deflate content codings, in both directions."""

import zlib
from functools import lru_cache
from typing import Final

from forebay.core.serving.errors import Kind, Refused
from forebay.wire.oip.fields import invalid

IDENTITY: Final = b"identity"
GZIP: Final = b"gzip"
DEFLATE: Final = b"deflate"
CODINGS: Final = b"gzip, deflate"
"""The codings accepted in requests."""
LEVEL: Final = 1
"""Higher levels take several times as long and save little on tensors."""
_EITHER_BITS: Final = zlib.MAX_WBITS | 32
"""zlib detects gzip or deflate by itself, as in Triton."""
_WRITTEN_BITS: Final = {GZIP: zlib.MAX_WBITS | 16, DEFLATE: zlib.MAX_WBITS}


@lru_cache(maxsize=64)
def answer_coding(accept: bytes) -> bytes:
    """The coding of a response, from `accept-encoding`: the one that the client names, if it names just one.

    Triton takes the best of any list. But HTTP libraries send a list by default, and compressing tensors takes longer
    than sending them; a client that wants it, such as Triton's own when configured so, names one.
    """
    wanted = IDENTITY
    for each in accept.split(b","):
        name, _, weight = each.lower().replace(b" ", b"").partition(b";q=")
        if name in (b"", IDENTITY) or _is_zero(weight):
            continue
        if wanted != IDENTITY or name not in (GZIP, DEFLATE):
            return IDENTITY
        wanted = name
    return wanted


def decoded(coding: bytes, body: bytes, bytes_max: int) -> bytes:
    """Decode a body. Raises `Refused`, also if the result would exceed `bytes_max`."""
    name = coding.strip().lower()
    if name in (b"", IDENTITY):
        return body
    if name not in (GZIP, DEFLATE):
        raise Refused(Kind.UNSUPPORTED, "Unsupported compression type")
    if not body:
        raise invalid("the body is empty, nothing to decompress")
    reader = zlib.decompressobj(_EITHER_BITS)
    try:
        data = reader.decompress(body, bytes_max + 1)
    except zlib.error:
        raise invalid("the body does not match its Content-Encoding") from None
    if len(data) > bytes_max:
        raise invalid(
            f"Decompressed data size exceeds the maximum allowed value of {bytes_max} bytes. "
            f"Use --http-max-input-size to increase the limit."
        )
    if not reader.eof:
        raise invalid("the compressed body is truncated")
    if reader.unused_data:  # such as a second member of gzip; empty ones by the million would take minutes
        raise invalid("the body goes on after its compressed data; compress it as a whole")
    return data


def beginning(coding: bytes, body: bytes, bytes_max: int) -> bytes:
    """At most that much of a decoded body, for who only looks at it; empty if it cannot be decoded."""
    name = coding.strip().lower()
    if name in (b"", IDENTITY):
        return body[:bytes_max]
    if name not in (GZIP, DEFLATE) or not bytes_max:
        return b""
    try:
        return zlib.decompressobj(_EITHER_BITS).decompress(body, bytes_max)
    except zlib.error:
        return b""


def encoded(coding: bytes, data: bytes) -> bytes:
    """Encode data in that coding (`GZIP` or `DEFLATE`)."""
    return zlib.compress(data, LEVEL, _WRITTEN_BITS[coding])


def _is_zero(weight: bytes) -> bool:
    return weight.startswith(b"0") and not weight.strip(b"0.")
