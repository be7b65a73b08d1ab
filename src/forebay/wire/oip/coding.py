"""Bodies in gzip or deflate, both ways."""

import zlib
from functools import lru_cache
from typing import Final

from forebay.core.serving.errors import Kind, Refused
from forebay.wire.oip.fields import invalid

IDENTITY: Final = b"identity"
GZIP: Final = b"gzip"
DEFLATE: Final = b"deflate"
CODINGS: Final = b"gzip, deflate"
"""What a client may send."""
LEVEL: Final = 1
"""Higher ones take several times as long and save little on tensors."""
_EITHER_BITS: Final = zlib.MAX_WBITS | 32
"""zlib finds out by itself whether it is given gzip or deflate, as in Triton."""
_WRITTEN_BITS: Final = {GZIP: zlib.MAX_WBITS | 16, DEFLATE: zlib.MAX_WBITS}


@lru_cache(maxsize=64)
def answer_coding(accept: bytes) -> bytes:
    """The coding of an answer to a client that accepts these: the one it names, if that is just one.

    Triton takes the best of any list. But a list is what HTTP libraries send unasked, and packing tensors costs more
    time than sending them; a client that wants it, such as Triton's own when told so, names one.
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
    """What a body of that coding holds. Raises `Refused`, also if that were more than `bytes_max`."""
    name = coding.strip().lower()
    if name in (b"", IDENTITY):
        return body
    if name not in (GZIP, DEFLATE):
        raise Refused(Kind.UNSUPPORTED, "Unsupported compression type")
    if not body:
        raise invalid("nothing to be decompressed")
    reader = zlib.decompressobj(_EITHER_BITS)
    try:
        data = reader.decompress(body, bytes_max + 1)
    except zlib.error:
        raise invalid("the body is not what its Content-Encoding says") from None
    if len(data) > bytes_max:
        raise invalid(
            f"Decompressed data size exceeds the maximum allowed value of {bytes_max} bytes. "
            f"Use --http-max-input-size to increase the limit."
        )
    if not reader.eof:
        raise invalid("the compressed body ends too soon")
    return data


def encoded(coding: bytes, data: bytes) -> bytes:
    """The data in that coding (`GZIP` or `DEFLATE`)."""
    return zlib.compress(data, LEVEL, _WRITTEN_BITS[coding])


def _is_zero(weight: bytes) -> bool:
    return weight.startswith(b"0") and not weight.strip(b"0.")
